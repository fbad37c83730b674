/* The numbers of pccl.values that compiled code knows, and the quantizer of an operation, which is made of them. */

#ifndef PCCL_KERNEL_VALUES_H
#define PCCL_KERNEL_VALUES_H

#include <stdint.h>

/* DataType */
enum {
    DATATYPE_UINT8,
    DATATYPE_INT8,
    DATATYPE_INT16,
    DATATYPE_UINT16,
    DATATYPE_UINT32,
    DATATYPE_INT32,
    DATATYPE_UINT64,
    DATATYPE_INT64,
    DATATYPE_FLOAT16,
    DATATYPE_BFLOAT16,
    DATATYPE_FLOAT,
    DATATYPE_DOUBLE,
    DATATYPES
};

/* ReduceOp */
enum { OP_SUM, OP_AVG, OP_PROD, OP_MAX, OP_MIN, OPS };

/* QuantizationAlgorithm */
enum {
    ALGORITHM_NONE = 0,
    ALGORITHM_MIN_MAX = 1,
    ALGORITHM_ZERO_POINT_SCALE = 2,
    ALGORITHM_MIN_MAX_4BIT = 100,
    ALGORITHM_ZERO_POINT_SCALE_4BIT = 101
};

/* How the elements of an operation become codes: what quantize_groups.h needs, and what the board keeps. */
typedef struct {
    uint32_t datatype; /* FLOAT16 to DOUBLE */
    uint32_t bits;     /* of a code: 4, 8 or 16; 0: elements are sent unchanged */
    uint32_t anchored; /* 1: zero is a whole number of steps (ZERO_POINT_SCALE) */
} quantizer;

#endif
