/* Arithmetic on one element: what every instruction set must compute, bit for bit.
 *
 * This file has the element types, the conversions of 16-bit floats, and the orders that MAX and MIN use. It has no
 * loops. Everything is free of branches and of undefined behaviour, so that a compiler can vectorize it; nothing
 * multiplies and then adds, so that nothing can be fused.
 */

#ifndef PCCL_KERNELS_ELEMENTS_H
#define PCCL_KERNELS_ELEMENTS_H

#include <stdint.h>
#include <string.h>

/* Always inlined, into code for any instruction set. */
#define ELEMENTAL static inline __attribute__((always_inline))

/* Elements in memory: at any address, also an odd one, and of any type that the caller gave them. */
#define ELEMENT __attribute__((aligned(1), may_alias))
typedef uint8_t u8_element ELEMENT;
typedef int8_t i8_element ELEMENT;
typedef uint16_t u16_element ELEMENT;
typedef int16_t i16_element ELEMENT;
typedef uint32_t u32_element ELEMENT;
typedef int32_t i32_element ELEMENT;
typedef uint64_t u64_element ELEMENT;
typedef int64_t i64_element ELEMENT;
typedef float f32_element ELEMENT;
typedef double f64_element ELEMENT;

/* The only NaN in results: quiet, positive, without payload. Processors differ in all three. */
#define NAN_F16 0x7E00u
#define NAN_BF16 0x7FC0u
#define NAN_F32 0x7FC00000u
#define NAN_F64 0x7FF8000000000000u

/* Infinity without its sign: every larger integer is a NaN. */
#define INFINITY_F16 0x7C00
#define INFINITY_BF16 0x7F80
#define INFINITY_F32 0x7F800000
#define INFINITY_F64 0x7FF0000000000000

ELEMENTAL uint32_t bits_of_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

ELEMENTAL float f32_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ELEMENTAL uint64_t bits_of_f64(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

ELEMENTAL double f64_of_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ELEMENTAL float settle_f32(float value) { return value == value ? value : f32_of_bits(NAN_F32); }

ELEMENTAL double settle_f64(double value) { return value == value ? value : f64_of_bits(NAN_F64); }

/* --- 16-bit floats ------------------------------------------------------------------------------------------- */

ELEMENTAL float f32_of_bf16(uint16_t half) { return f32_of_bits((uint32_t)half << 16); }

/* To the nearest, ties to even; the carry may correctly run into the exponent, and from there into infinity. */
ELEMENTAL uint16_t bf16_of_f32(float value) {
    uint32_t bits = bits_of_f32(value);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value == value ? rounded : NAN_BF16);
}

/* The exponent is moved from bias 15 to 127; its largest value (infinity, NaN) must become the largest value again.
 * A subnormal becomes the mantissa of a number just above 2^-14; then 2^-14 is subtracted: exact, and normalised. */
ELEMENTAL float f32_of_f16(uint16_t half) {
    int32_t magnitude = half & 0x7FFF;
    int32_t normal = (magnitude << 13) + 0x38000000 + (magnitude >= INFINITY_F16 ? 0x38000000 : 0);
    float subnormal = f32_of_bits(((uint32_t)magnitude << 13) + 0x38800000u) - f32_of_bits(0x38800000u);
    uint32_t bits = magnitude >= 0x0400 ? (uint32_t)normal : bits_of_f32(subnormal);
    return f32_of_bits(bits | ((uint32_t)(half & 0x8000) << 16));
}

/* To the nearest, ties to even. Below 2^-14 the addition of 0.5 does the rounding: the last bit of that sum weighs
 * 2^-24, as the last bit of a subnormal does. From 65520 on everything is infinity. */
ELEMENTAL uint16_t f16_of_f32(float value) {
    uint32_t bits = bits_of_f32(value);
    int32_t magnitude = (int32_t)(bits & 0x7FFFFFFFu);
    int32_t normal = (magnitude - 0x38000000 + 0x0FFF + ((magnitude >> 13) & 1)) >> 13;
    int32_t bounded = magnitude >= 0x477FF000 ? INFINITY_F16 : normal;
    int32_t subnormal = (int32_t)(bits_of_f32(f32_of_bits((uint32_t)magnitude) + 0.5f) - 0x3F000000u);
    int32_t rounded = magnitude >= 0x38800000 ? bounded : subnormal;
    uint32_t sign = (bits >> 16) & 0x8000u;
    return (uint16_t)(magnitude > INFINITY_F32 ? NAN_F16 : (uint32_t)rounded | sign);
}

/* --- the larger and the smaller of two ----------------------------------------------------------------------- */

#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))

/* Floats are ordered by their bits, read as a signed integer whose magnitude is flipped when it is negative. So
 * minus zero lies below plus zero, for MAX and MIN alike, and no floating-point comparison is needed. */
#define DEFINE_LIMITS(name, integer, sign_shift, magnitude_bits, infinity, nan)                                        \
    ELEMENTAL integer order_##name(integer bits) {                                                                     \
        return (integer)(bits ^ ((bits >> sign_shift) & magnitude_bits));                                              \
    }                                                                                                                  \
    ELEMENTAL integer nan_or_##name(integer winner, integer a, integer b) {                                            \
        integer a_magnitude = (integer)(a & magnitude_bits), b_magnitude = (integer)(b & magnitude_bits);              \
        return LARGER(a_magnitude, b_magnitude) > infinity ? (integer)nan : winner;                                    \
    }                                                                                                                  \
    ELEMENTAL integer larger_##name(integer a, integer b) {                                                            \
        return nan_or_##name(order_##name(a) > order_##name(b) ? a : b, a, b);                                         \
    }                                                                                                                  \
    ELEMENTAL integer smaller_##name(integer a, integer b) {                                                           \
        return nan_or_##name(order_##name(a) < order_##name(b) ? a : b, a, b);                                         \
    }

DEFINE_LIMITS(f16, int16_t, 15, 0x7FFF, INFINITY_F16, NAN_F16)
DEFINE_LIMITS(bf16, int16_t, 15, 0x7FFF, INFINITY_BF16, NAN_BF16)
DEFINE_LIMITS(f32, int32_t, 31, 0x7FFFFFFF, INFINITY_F32, NAN_F32)
DEFINE_LIMITS(f64, int64_t, 63, 0x7FFFFFFFFFFFFFFF, INFINITY_F64, NAN_F64)
#undef DEFINE_LIMITS

#endif
