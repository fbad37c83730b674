/* Quantization: a block of floats as groups of small integers, and back.
 *
 * This file has the format and the choices that are made once per group; the loops over elements are in
 * quantize_loops.h. Nothing here allocates, waits, or knows of rings.
 *
 * A group of 512 floats, or of 1024 doubles, is encoded as
 *
 *     low         the value of code 0: a float, or a double
 *     step        the difference between two codes: the upper half of the bits of such a number, rounded up
 *     codes       4, 8 or 16 bits each; value = low + code * step
 *
 * and the last group of a block may be shorter. 16-bit floats are widened to floats first and rounded at the end. An
 * outlier affects only its own group. All peers decode the same bytes to the same bits, on every instruction set:
 *
 *   - The step has so few significant bits (8, of a double 21) that a code times a step is exact. One rounding is
 *     left, that of the sum, and nothing depends on whether a compiler or a processor fuses the two.
 *   - low is the least value of the group (MIN_MAX), or a whole number of steps (ZERO_POINT_SCALE); then the values are
 *     whole numbers of steps as well, without any rounding, and zero is among them.
 *   - The step is the range divided by the largest code, rounded up, so no code is out of bounds, and no value is
 *     further from its code than half a step, except for the rounding of the sum. ZERO_POINT_SCALE extends the range to
 *     zero and uses one code to move zero to a whole step.
 *   - A group whose values are all equal has step 0 and low that value: it is exact, except for the sign of zero.
 *   - A group whose largest value, decoded, would exceed its type is *rough*, and so is one with a NaN or an infinity:
 *     the sign bit of the step marks it. Its last three codes are NaN, minus and plus infinity, so these values stay
 *     at their positions; the other values use the codes below, as in MIN_MAX. They are computed one by one, in double
 *     precision and in halves, so that no range is too large.
 *
 * The step of a float is at least 2^-133, its smallest upper half; subnormals that are closer get the same code.
 */

#ifndef PCCL_KERNELS_QUANTIZE_GROUPS_H
#define PCCL_KERNELS_QUANTIZE_GROUPS_H

#include <math.h> /* isfinite, INFINITY: nothing that would have to be linked */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "elements.h"
#include "kernel_values.h"

typedef void (*bounds_loop)(const void *values, size_t count, int64_t *least, int64_t *most);
typedef void (*codes_loop)(void *codes, const void *values, size_t count, double low, double step);
typedef void (*values_loop)(void *values, const void *codes, size_t count, double low, double step);
typedef void (*convert_loop)(void *target, const void *source, size_t count);

/* The loops of an instruction set: by float or double, and by 4, 8 or 16 bits; or by float16 or bfloat16. */
typedef struct {
    bounds_loop bounds[2];
    codes_loop codes[2][3];
    values_loop values[2][3];
    convert_loop widen[2], narrow[2];
} group_loops;

enum {
    GROUP_FLOATS = 512,
    GROUP_DOUBLES = 1024,
    GROUP_BYTES_MAX = 8192, /* decoded */
    ROUGH_CODES = 3         /* the last codes of a rough group: NaN, minus and plus infinity */
};

#define LARGEST_F32 0x1.FFFFFEp127
#define LARGEST_F64 0x1.FFFFFFFFFFFFFp1023

/* What the codes of one group mean. */
typedef struct {
    double low, step;
    int rough;
} group_scale;

static inline int quantizer_is_double(const quantizer *how) { return how->datatype == DATATYPE_DOUBLE; }
static inline size_t quantizer_group(const quantizer *how) {
    return quantizer_is_double(how) ? GROUP_DOUBLES : GROUP_FLOATS;
}
static inline size_t quantizer_scale_bytes(const quantizer *how) { return quantizer_is_double(how) ? 12 : 6; }
static inline uint32_t quantizer_largest(const quantizer *how) { return (1u << how->bits) - 1; }
static inline int quantizer_width(const quantizer *how) { return how->bits >> 3; } /* 0, 1, 2: an index of loops */

static inline size_t quantizer_bytes(const quantizer *how, size_t count) {
    const size_t groups = (count + quantizer_group(how) - 1) / quantizer_group(how);
    return groups * quantizer_scale_bytes(how) + (count * how->bits + 7) / 8;
}

/* The largest finite number of the type. */
static inline double quantizer_limit(const quantizer *how) {
    static const double limits[] = {65504.0, 0x1.FEp127, LARGEST_F32, LARGEST_F64};
    return limits[how->datatype - DATATYPE_FLOAT16];
}

/* --- choosing a scale ---------------------------------------------------------------------------------------- */

/* Rounds up to the next number whose lower half of bits is zero. */
static double step_rounded_up(int is_double, double exact) {
    if (is_double) {
        const uint64_t bits = bits_of_f64(exact);
        return f64_of_bits((bits + 0xFFFFFFFFu) & ~(uint64_t)0xFFFFFFFFu);
    }
    uint32_t bits = bits_of_f32((float)exact);
    if ((double)f32_of_bits(bits) < exact) ++bits;
    return f32_of_bits((bits + 0xFFFFu) & 0xFFFF0000u);
}

static double whole_not_below(double steps) {
    const double whole = (double)(int64_t)steps;
    return whole < steps ? whole + 1 : whole;
}

/* The scale of finite values. Rough if a decoded value would exceed its type, or a difference the type of the
 * computation. */
static group_scale scale_chosen(const quantizer *how, double least, double most) {
    group_scale scale = {least + 0.0, 0, 0};
    if (least == most) return scale;
    double steps = quantizer_largest(how);
    if (how->anchored) {
        least = SMALLER(least, 0);
        most = LARGER(most, 0);
        steps -= 1;
    }
    const double range = most - least, room = quantizer_is_double(how) ? LARGEST_F64 : LARGEST_F32;
    scale.rough = !(range <= room);
    if (scale.rough) return scale;
    /* For the smallest doubles the quotient may be 0; the step must not be. */
    scale.step = step_rounded_up(quantizer_is_double(how), LARGER(range / steps, 0x1p-1074));
    if (how->anchored) scale.low = 0 - whole_not_below(-least / scale.step) * scale.step;
    const double limit = quantizer_limit(how), reach = quantizer_largest(how) * scale.step;
    scale.rough = !(reach <= room && scale.low + reach <= limit && scale.low >= -limit);
    return scale;
}

/* Finds the least and the largest value; false if one is not finite. order_f32 and order_f64 are their own inverses. */
static int bounds_found(const group_loops *loops, const quantizer *how, const void *values, size_t count, double *least,
                        double *most) {
    int64_t first, last;
    const int is_double = quantizer_is_double(how);
    loops->bounds[is_double](values, count, &first, &last);
    if (is_double) {
        *least = f64_of_bits((uint64_t)order_f64(first));
        *most = f64_of_bits((uint64_t)order_f64(last));
    } else {
        *least = f32_of_bits((uint32_t)order_f32((int32_t)first));
        *most = f32_of_bits((uint32_t)order_f32((int32_t)last));
    }
    return isfinite(*least) && isfinite(*most);
}

/* --- rough groups: one by one -------------------------------------------------------------------------------- */

static double number_at(const quantizer *how, const void *values, size_t index) {
    if (quantizer_is_double(how)) return ((const f64_element *)values)[index];
    return (double)((const f32_element *)values)[index];
}

static uint32_t code_at(const quantizer *how, const uint8_t *codes, size_t count, size_t index) {
    const size_t half = (count + 1) / 2;
    if (how->bits == 4) return index < half ? codes[index] & 15u : (uint32_t)codes[index - half] >> 4;
    return how->bits == 8 ? codes[index] : ((const u16_element *)codes)[index];
}

/* Must be called in ascending order of index, because two codes share a byte. */
static void set_code_at(const quantizer *how, uint8_t *codes, size_t count, size_t index, uint32_t code) {
    const size_t half = (count + 1) / 2;
    if (how->bits == 8)
        codes[index] = (uint8_t)code;
    else if (how->bits == 16)
        ((u16_element *)codes)[index] = (uint16_t)code;
    else if (index < half)
        codes[index] = (uint8_t)code;
    else
        codes[index - half] |= (uint8_t)(code << 4);
}

/* To the nearest even, as in quantize_loops.h. */
static uint32_t code_of_steps(double steps) { return (uint32_t)bits_of_f64(steps + 0x1p52); }

static group_scale encode_rough(const quantizer *how, uint8_t *codes, const void *values, size_t count) {
    const uint32_t top = quantizer_largest(how) - ROUGH_CODES;
    double least = INFINITY, most = -INFINITY;
    for (size_t i = 0; i < count; ++i) {
        const double value = number_at(how, values, i);
        least = isfinite(value) ? SMALLER(value, least) : least;
        most = isfinite(value) ? LARGER(value, most) : most;
    }
    group_scale scale = {least <= most ? least + 0.0 : 0, 0, 1};
    const double range = most - least;
    if (range > 0) {
        const double exact = isfinite(range) ? range / top : most / top - least / top;
        scale.step = step_rounded_up(quantizer_is_double(how), LARGER(exact, 0x1p-1074));
    }
    for (size_t i = 0; i < count; ++i) {
        const double value = number_at(how, values, i);
        uint32_t code = 0;
        if (!isfinite(value))
            code = top + (value != value ? 1 : value < 0 ? 2 : 3);
        else if (scale.step > 0)
            code = (uint32_t)SMALLER(code_of_steps((value / 2 - scale.low / 2) / (scale.step / 2)), top);
        set_code_at(how, codes, count, i, code);
    }
    return scale;
}

static void decode_rough(const quantizer *how, void *values, const uint8_t *codes, size_t count, group_scale scale) {
    const uint32_t top = quantizer_largest(how) - ROUGH_CODES;
    const double limit = quantizer_limit(how);
    for (size_t i = 0; i < count; ++i) {
        const uint32_t code = code_at(how, codes, count, i);
        double value = scale.low;
        if (code > top)
            value = code == top + 1 ? f64_of_bits(NAN_F64) : code == top + 2 ? -INFINITY : INFINITY;
        else if (scale.step > 0) {
            value = 2 * (scale.low / 2 + code * (scale.step / 2));
            value = SMALLER(value, limit);
        }
        if (quantizer_is_double(how))
            ((f64_element *)values)[i] = value;
        else
            ((f32_element *)values)[i] = settle_f32((float)value);
    }
}

/* --- a group's scale in memory ------------------------------------------------------------------------------- */

static void scale_write(const quantizer *how, uint8_t *to, group_scale scale) {
    if (quantizer_is_double(how)) {
        const uint32_t step = (uint32_t)(bits_of_f64(scale.step) >> 32) | (uint32_t)scale.rough << 31;
        memcpy(to, &scale.low, 8);
        memcpy(to + 8, &step, 4);
    } else {
        const float low = (float)scale.low;
        const uint16_t step = (uint16_t)(bits_of_f32((float)scale.step) >> 16 | (uint32_t)scale.rough << 15);
        memcpy(to, &low, 4);
        memcpy(to + 4, &step, 2);
    }
}

static group_scale scale_read(const quantizer *how, const uint8_t *from) {
    group_scale scale;
    if (quantizer_is_double(how)) {
        uint32_t step;
        memcpy(&scale.low, from, 8);
        memcpy(&step, from + 8, 4);
        scale.rough = (int)(step >> 31);
        scale.step = f64_of_bits((uint64_t)(step & 0x7FFFFFFFu) << 32);
    } else {
        float low;
        uint16_t step;
        memcpy(&low, from, 4);
        memcpy(&step, from + 4, 2);
        scale.rough = step >> 15;
        scale.low = low;
        scale.step = f32_of_bits((uint32_t)(step & 0x7FFFu) << 16);
    }
    return scale;
}

/* --- blocks -------------------------------------------------------------------------------------------------- */

/* Encodes one group of floats or doubles. Returns how many bytes it takes. */
static size_t encode_group(const group_loops *loops, const quantizer *how, uint8_t *to, const void *values,
                           size_t count) {
    uint8_t *codes = to + quantizer_scale_bytes(how);
    const size_t nbytes = (count * how->bits + 7) / 8;
    double least, most;
    group_scale scale = {0, 0, 1};
    if (bounds_found(loops, how, values, count, &least, &most)) scale = scale_chosen(how, least, most);
    if (scale.rough)
        scale = encode_rough(how, codes, values, count);
    else if (scale.step > 0)
        loops->codes[quantizer_is_double(how)][quantizer_width(how)](codes, values, count, scale.low, scale.step);
    else
        memset(codes, 0, nbytes);
    scale_write(how, to, scale);
    return quantizer_scale_bytes(how) + nbytes;
}

static size_t decode_group(const group_loops *loops, const quantizer *how, void *values, const uint8_t *from,
                           size_t count) {
    const uint8_t *codes = from + quantizer_scale_bytes(how);
    const group_scale scale = scale_read(how, from);
    if (scale.rough)
        decode_rough(how, values, codes, count, scale);
    else
        loops->values[quantizer_is_double(how)][quantizer_width(how)](values, codes, count, scale.low, scale.step);
    return quantizer_scale_bytes(how) + (count * how->bits + 7) / 8;
}

/* The index of a 16-bit float; -1: it is another type. */
static inline int quantizer_half(const quantizer *how) {
    return how->datatype <= DATATYPE_BFLOAT16 ? (int)(how->datatype - DATATYPE_FLOAT16) : -1;
}

static void encode_values(const group_loops *loops, const quantizer *how, void *coded, const void *values,
                          size_t count) {
    const int half = quantizer_half(how);
    const size_t itemsize = half >= 0 ? 2 : quantizer_is_double(how) ? 8 : 4;
    uint8_t *to = (uint8_t *)coded;
    const uint8_t *from = (const uint8_t *)values;
    float wide[GROUP_FLOATS];
    while (count > 0) {
        const size_t some = SMALLER(count, quantizer_group(how));
        if (half >= 0) loops->widen[half](wide, from, some);
        to += encode_group(loops, how, to, half >= 0 ? (const void *)wide : from, some);
        from += some * itemsize;
        count -= some;
    }
}

/* Decodes one group into its own type. Returns how many bytes it took. */
static size_t decode_one(const group_loops *loops, const quantizer *how, void *values, const uint8_t *from,
                         size_t count) {
    const int half = quantizer_half(how);
    float wide[GROUP_FLOATS];
    if (half < 0) return decode_group(loops, how, values, from, count);
    const size_t taken = decode_group(loops, how, wide, from, count);
    loops->narrow[half](values, wide, count);
    return taken;
}

#endif
