/* The loops over rows, once for every instruction set: digest.h includes this file with other macros each time.
 *
 *   NAME(x)    x with the suffix of the set
 *   TARGET     the attribute that lets the compiler use the set
 *
 * and with a type and four functions of digest_vectors.h: NAME(words) is a vector of words, NAME(load), NAME(store),
 * NAME(step) and NAME(add) do what their names say with all its words. A row is a fixed number of vectors, all of which
 * stay in registers from the first row to the last; none depends on another.
 */

#define VECTOR_BYTES sizeof(NAME(words))
#define VECTORS (DIGEST_ROW_BYTES / VECTOR_BYTES)

/* Mixes whole rows into the lanes. */
TARGET static void NAME(digest_rows)(uint64_t lanes[DIGEST_LANES], const uint8_t *data, size_t rows) {
    NAME(words) held[VECTORS];
    UNROLLED for (size_t i = 0; i < VECTORS; ++i) held[i] = NAME(load)((const uint8_t *)lanes + i * VECTOR_BYTES);
    for (; rows > 0; --rows, data += DIGEST_ROW_BYTES)
        UNROLLED for (size_t i = 0; i < VECTORS; ++i)
            held[i] = NAME(step)(held[i], NAME(load)(data + i * VECTOR_BYTES));
    UNROLLED for (size_t i = 0; i < VECTORS; ++i) NAME(store)((uint8_t *)lanes + i * VECTOR_BYTES, held[i]);
}

/* Reads the same bytes in the same way and only adds them: shows the speed that the memory allows. */
TARGET static void NAME(sum_rows)(uint64_t lanes[DIGEST_LANES], const uint8_t *data, size_t rows) {
    NAME(words) held[VECTORS];
    UNROLLED for (size_t i = 0; i < VECTORS; ++i) held[i] = NAME(load)((const uint8_t *)lanes + i * VECTOR_BYTES);
    for (; rows > 0; --rows, data += DIGEST_ROW_BYTES)
        UNROLLED for (size_t i = 0; i < VECTORS; ++i)
            held[i] = NAME(add)(held[i], NAME(load)(data + i * VECTOR_BYTES));
    UNROLLED for (size_t i = 0; i < VECTORS; ++i) NAME(store)((uint8_t *)lanes + i * VECTOR_BYTES, held[i]);
}

#undef VECTOR_BYTES
#undef VECTORS
#undef NAME
#undef TARGET
