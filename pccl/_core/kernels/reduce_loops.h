/* The reduce loops, once for every instruction set: arithmetic.h includes this file with other macros each time.
 *
 *   NAME(x)            x with the suffix of the set
 *   TARGET             the attribute that lets the compiler use the set
 *   LANES              how many 16-bit floats half_vectors.h handles at once; 0: it does not support the set
 *
 * Each operation is one expression of a (local) and b (incoming); the loop around it is the same for all. The compiler
 * vectorizes the plain loops. It cannot vectorize the conversion of 16-bit floats, which is in half_vectors.h.
 */

#define SIGNATURE void *out, const void *local, const void *incoming, size_t count, uint32_t divisor

/* `out` may be `local` or `incoming`. An element depends only on itself: INDEPENDENT says so, because the compiler
 * cannot see it. */
#define LOOP(name, element, expression)                                                                                \
    TARGET static void NAME(name)(SIGNATURE) {                                                                         \
        element *target = (element *)out;                                                                              \
        const element *left = (const element *)local;                                                                  \
        const element *right = (const element *)incoming;                                                              \
        (void)divisor;                                                                                                 \
        INDEPENDENT                                                                                                    \
        for (size_t i = 0; i < count; ++i) {                                                                           \
            const element a = left[i], b = right[i];                                                                   \
            target[i] = (element)(expression);                                                                         \
        }                                                                                                              \
    }

/* 16-bit floats: widened, computed in single precision, rounded once; two vectors of floats for each vector of halves.
 * The rest, or everything if the set has no such vectors, is computed one by one; the compiler may vectorize that. */
#if LANES
#define WIDE_STEP(member, expression)                                                                                  \
    {                                                                                                                  \
        const NAME(floats) a = x.member, b = y.member;                                                                 \
        x.member = expression;                                                                                         \
    }
#define WIDE_PART(kind, expression)                                                                                    \
    const NAME(floats) by = NAME(spread)((float)divisor);                                                              \
    (void)by;                                                                                                          \
    for (; done + LANES <= count; done += LANES) {                                                                     \
        NAME(pair) x = NAME(widen_##kind)(left + done);                                                                \
        const NAME(pair) y = NAME(widen_##kind)(right + done);                                                         \
        WIDE_STEP(first, expression)                                                                                   \
        WIDE_STEP(second, expression)                                                                                  \
        NAME(narrow_##kind)(target + done, x);                                                                         \
    }
#else
#define WIDE_PART(kind, expression)
#endif

#define HALF_LOOP(name, kind, expression)                                                                              \
    ELEMENTAL uint16_t NAME(name##_one)(uint16_t left, uint16_t right, float by) {                                     \
        const float a = f32_of_##kind(left), b = f32_of_##kind(right);                                                 \
        (void)by;                                                                                                      \
        return kind##_of_f32(expression);                                                                              \
    }                                                                                                                  \
    LOOP(name##_rest, u16_element, NAME(name##_one)(a, b, (float)divisor))                                             \
    TARGET static void NAME(name)(SIGNATURE) {                                                                         \
        u16_element *target = (u16_element *)out;                                                                      \
        const u16_element *left = (const u16_element *)local;                                                          \
        const u16_element *right = (const u16_element *)incoming;                                                      \
        size_t done = 0;                                                                                               \
        WIDE_PART(kind, expression)                                                                                    \
        NAME(name##_rest)(target + done, left + done, right + done, count - done, divisor);                            \
    }

/* Signed and unsigned sums and products have the same bits. Narrow factors are widened to unsigned integers first,
 * because C would widen them to int, which may overflow. */
LOOP(sum_8, u8_element, a + b)
LOOP(sum_16, u16_element, a + b)
LOOP(sum_32, u32_element, a + b)
LOOP(sum_64, u64_element, a + b)
HALF_LOOP(sum_f16, f16, a + b)
HALF_LOOP(sum_bf16, bf16, a + b)
LOOP(sum_f32, f32_element, settle_f32(a + b))
LOOP(sum_f64, f64_element, settle_f64(a + b))

LOOP(product_8, u8_element, (uint32_t)a * b)
LOOP(product_16, u16_element, (uint32_t)a * b)
LOOP(product_32, u32_element, a * b)
LOOP(product_64, u64_element, a * b)
HALF_LOOP(product_f16, f16, a * b)
HALF_LOOP(product_bf16, bf16, a * b)
LOOP(product_f32, f32_element, settle_f32(a * b))
LOOP(product_f64, f64_element, settle_f64(a * b))

/* Narrow integers are divided as floats, which processors do many at a time. That is exact: a quotient that is no
 * integer lies at least 1/divisor away from the next one, far more than the rounding of a type with twice the bits;
 * and a divisor too large for the float is so large that the quotient is zero anyway. */
LOOP(mean_u8, u8_element, (int32_t)((float)(uint8_t)(a + b) / (float)divisor))
LOOP(mean_i8, i8_element, (int32_t)((float)(int8_t)(a + b) / (float)divisor))
LOOP(mean_u16, u16_element, (int32_t)((float)(uint16_t)(a + b) / (float)divisor))
LOOP(mean_i16, i16_element, (int32_t)((float)(int16_t)(a + b) / (float)divisor))
LOOP(mean_u32, u32_element, (double)(a + b) / (double)divisor)
LOOP(mean_i32, i32_element, (double)(int32_t)((uint32_t)a + (uint32_t)b) / (double)divisor)
LOOP(mean_u64, u64_element, (a + b) / divisor)
LOOP(mean_i64, i64_element, (int64_t)((uint64_t)a + (uint64_t)b) / (int64_t)divisor)
HALF_LOOP(mean_f16, f16, (a + b) / by)
HALF_LOOP(mean_bf16, bf16, (a + b) / by)
LOOP(mean_f32, f32_element, settle_f32((a + b) / (float)divisor))
LOOP(mean_f64, f64_element, settle_f64((a + b) / (double)divisor))

LOOP(larger_u8, u8_element, LARGER(a, b))
LOOP(larger_i8, i8_element, LARGER(a, b))
LOOP(larger_u16, u16_element, LARGER(a, b))
LOOP(larger_i16, i16_element, LARGER(a, b))
LOOP(larger_u32, u32_element, LARGER(a, b))
LOOP(larger_i32, i32_element, LARGER(a, b))
LOOP(larger_u64, u64_element, LARGER(a, b))
LOOP(larger_i64, i64_element, LARGER(a, b))
LOOP(larger_f16, i16_element, larger_f16(a, b))
LOOP(larger_bf16, i16_element, larger_bf16(a, b))
LOOP(larger_f32, i32_element, larger_f32(a, b))
LOOP(larger_f64, i64_element, larger_f64(a, b))

LOOP(smaller_u8, u8_element, SMALLER(a, b))
LOOP(smaller_i8, i8_element, SMALLER(a, b))
LOOP(smaller_u16, u16_element, SMALLER(a, b))
LOOP(smaller_i16, i16_element, SMALLER(a, b))
LOOP(smaller_u32, u32_element, SMALLER(a, b))
LOOP(smaller_i32, i32_element, SMALLER(a, b))
LOOP(smaller_u64, u64_element, SMALLER(a, b))
LOOP(smaller_i64, i64_element, SMALLER(a, b))
LOOP(smaller_f16, i16_element, smaller_f16(a, b))
LOOP(smaller_bf16, i16_element, smaller_bf16(a, b))
LOOP(smaller_f32, i32_element, smaller_f32(a, b))
LOOP(smaller_f64, i64_element, smaller_f64(a, b))

/* By datatype and operation; the loop of AVG divides the sum. */
static const reduce_loop NAME(loops)[DATATYPES][OPS] = {
    [DATATYPE_UINT8] = {NAME(sum_8), NAME(mean_u8), NAME(product_8), NAME(larger_u8), NAME(smaller_u8)},
    [DATATYPE_INT8] = {NAME(sum_8), NAME(mean_i8), NAME(product_8), NAME(larger_i8), NAME(smaller_i8)},
    [DATATYPE_INT16] = {NAME(sum_16), NAME(mean_i16), NAME(product_16), NAME(larger_i16), NAME(smaller_i16)},
    [DATATYPE_UINT16] = {NAME(sum_16), NAME(mean_u16), NAME(product_16), NAME(larger_u16), NAME(smaller_u16)},
    [DATATYPE_UINT32] = {NAME(sum_32), NAME(mean_u32), NAME(product_32), NAME(larger_u32), NAME(smaller_u32)},
    [DATATYPE_INT32] = {NAME(sum_32), NAME(mean_i32), NAME(product_32), NAME(larger_i32), NAME(smaller_i32)},
    [DATATYPE_UINT64] = {NAME(sum_64), NAME(mean_u64), NAME(product_64), NAME(larger_u64), NAME(smaller_u64)},
    [DATATYPE_INT64] = {NAME(sum_64), NAME(mean_i64), NAME(product_64), NAME(larger_i64), NAME(smaller_i64)},
    [DATATYPE_FLOAT16] = {NAME(sum_f16), NAME(mean_f16), NAME(product_f16), NAME(larger_f16), NAME(smaller_f16)},
    [DATATYPE_BFLOAT16] = {NAME(sum_bf16), NAME(mean_bf16), NAME(product_bf16), NAME(larger_bf16), NAME(smaller_bf16)},
    [DATATYPE_FLOAT] = {NAME(sum_f32), NAME(mean_f32), NAME(product_f32), NAME(larger_f32), NAME(smaller_f32)},
    [DATATYPE_DOUBLE] = {NAME(sum_f64), NAME(mean_f64), NAME(product_f64), NAME(larger_f64), NAME(smaller_f64)},
};

#undef SIGNATURE
#undef LOOP
#undef WIDE_STEP
#undef WIDE_PART
#undef HALF_LOOP
