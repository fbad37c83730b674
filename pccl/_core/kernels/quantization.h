/* The quantizer of an operation: what quantize_groups.h needs to know, and what the board keeps. */

#ifndef PCCL_KERNELS_QUANTIZATION_H
#define PCCL_KERNELS_QUANTIZATION_H

#include <stdint.h>

typedef struct {
    uint32_t datatype; /* FLOAT16 to DOUBLE */
    uint32_t bits;     /* of a code: 4, 8 or 16; 0: elements travel as they are */
    uint32_t anchored; /* 1: zero is a whole number of steps (ZERO_POINT_SCALE) */
} quantizer;

#endif
