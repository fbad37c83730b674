/* The loops of quantization, once for every instruction set: arithmetic.h includes this file after reduce_loops.h.
 *
 *   NAME(x)            x with the suffix of the set
 *   TARGET             the attribute that lets the compiler use the set
 *
 * Each loop handles one group, whose bounds or scale quantize_groups.h has chosen. The compiler vectorizes all loops.
 * Each operation on an element rounds once, so every set computes the same bits.
 */

/* The least and the largest value, as integers in the order of the floats: NaN lies beyond the infinities. */
#define BOUNDS(kind, integer, element, largest)                                                                        \
    TARGET static void NAME(bounds_##kind)(const void *values, size_t count, int64_t *least, int64_t *most) {          \
        const element *bits = (const element *)values;                                                                 \
        integer low = largest, high = -largest - 1;                                                                    \
        for (size_t i = 0; i < count; ++i) {                                                                           \
            const integer key = order_##kind(bits[i]);                                                                 \
            low = SMALLER(key, low);                                                                                   \
            high = LARGER(key, high);                                                                                  \
        }                                                                                                              \
        *least = low;                                                                                                  \
        *most = high;                                                                                                  \
    }

BOUNDS(f32, int32_t, i32_element, INT32_MAX)
BOUNDS(f64, int64_t, i64_element, INT64_MAX)

/* Rounds a number of steps in [0, 2^16) to the nearest even integer: the sum with a power of two whose last bit weighs
 * one has the integer in its lowest bits. */
ELEMENTAL uint32_t NAME(code_f32)(float value, float low, float step) {
    return bits_of_f32((value - low) / step + 0x1p23f);
}

ELEMENTAL uint32_t NAME(code_f64)(double value, double low, double step) {
    return (uint32_t)bits_of_f64((value - low) / step + 0x1p52);
}

#define CODES(kind, number, element, bits, code)                                                                       \
    TARGET static void NAME(codes_##kind##_##bits)(void *codes, const void *values, size_t count, double low,          \
                                                   double step) {                                                      \
        const element *from = (const element *)values;                                                                 \
        code *to = (code *)codes;                                                                                      \
        const number base = (number)low, by = (number)step;                                                            \
        INDEPENDENT                                                                                                    \
        for (size_t i = 0; i < count; ++i) to[i] = (code)NAME(code_##kind)(from[i], base, by);                         \
    }                                                                                                                  \
    TARGET static void NAME(values_##kind##_##bits)(void *values, const void *codes, size_t count, double low,         \
                                                    double step) {                                                     \
        const code *from = (const code *)codes;                                                                        \
        element *to = (element *)values;                                                                               \
        const number base = (number)low, by = (number)step;                                                            \
        INDEPENDENT                                                                                                    \
        for (size_t i = 0; i < count; ++i) to[i] = base + (number)(int32_t)from[i] * by;                               \
    }

/* Two codes per byte: the first half of the group in the low bits, the second half in the high bits, so nothing is
 * interleaved. The middle code of an odd group has a byte of its own. */
#define NIBBLES(kind, number, element)                                                                                 \
    TARGET static void NAME(codes_##kind##_4)(void *codes, const void *values, size_t count, double low,               \
                                              double step) {                                                           \
        const size_t half = (count + 1) / 2;                                                                           \
        const element *first = (const element *)values, *second = first + half;                                        \
        u8_element *to = (u8_element *)codes;                                                                          \
        const number base = (number)low, by = (number)step;                                                            \
        INDEPENDENT                                                                                                    \
        for (size_t i = 0; i < count / 2; ++i) {                                                                       \
            const uint32_t below = NAME(code_##kind)(first[i], base, by);                                              \
            const uint32_t above = NAME(code_##kind)(second[i], base, by);                                             \
            to[i] = (uint8_t)((below & 15u) | above << 4);                                                             \
        }                                                                                                              \
        if (count % 2) to[half - 1] = (uint8_t)(NAME(code_##kind)(first[half - 1], base, by) & 15u);                   \
    }                                                                                                                  \
    TARGET static void NAME(values_##kind##_4)(void *values, const void *codes, size_t count, double low,              \
                                               double step) {                                                          \
        const size_t half = (count + 1) / 2;                                                                           \
        const u8_element *from = (const u8_element *)codes;                                                            \
        element *first = (element *)values, *second = first + half;                                                    \
        const number base = (number)low, by = (number)step;                                                            \
        INDEPENDENT                                                                                                    \
        for (size_t i = 0; i < half; ++i) first[i] = base + (number)(int32_t)(from[i] & 15) * by;                      \
        INDEPENDENT                                                                                                    \
        for (size_t i = 0; i < count / 2; ++i) second[i] = base + (number)(int32_t)(from[i] >> 4) * by;                \
    }

NIBBLES(f32, float, f32_element)
NIBBLES(f64, double, f64_element)
CODES(f32, float, f32_element, 8, u8_element)
CODES(f64, double, f64_element, 8, u8_element)
CODES(f32, float, f32_element, 16, u16_element)
CODES(f64, double, f64_element, 16, u16_element)

#define CONVERSION(name, to_element, from_element, expression)                                                         \
    TARGET static void NAME(name)(void *target, const void *source, size_t count) {                                    \
        to_element *to = (to_element *)target;                                                                         \
        const from_element *from = (const from_element *)source;                                                       \
        INDEPENDENT                                                                                                    \
        for (size_t i = 0; i < count; ++i) to[i] = expression(from[i]);                                                \
    }

CONVERSION(floats_of_f16, f32_element, u16_element, f32_of_f16)
CONVERSION(floats_of_bf16, f32_element, u16_element, f32_of_bf16)
CONVERSION(f16_of_floats, u16_element, f32_element, f16_of_f32)
CONVERSION(bf16_of_floats, u16_element, f32_element, bf16_of_f32)

static const group_loops NAME(groups) = {
    .bounds = {NAME(bounds_f32), NAME(bounds_f64)},
    .codes = {{NAME(codes_f32_4), NAME(codes_f32_8), NAME(codes_f32_16)},
              {NAME(codes_f64_4), NAME(codes_f64_8), NAME(codes_f64_16)}},
    .values = {{NAME(values_f32_4), NAME(values_f32_8), NAME(values_f32_16)},
               {NAME(values_f64_4), NAME(values_f64_8), NAME(values_f64_16)}},
    .widen = {NAME(floats_of_f16), NAME(floats_of_bf16)},
    .narrow = {NAME(f16_of_floats), NAME(bf16_of_floats)},
};

#undef BOUNDS
#undef CODES
#undef NIBBLES
#undef CONVERSION
#undef NAME
#undef TARGET
#undef LANES
