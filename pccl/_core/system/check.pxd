# Contents of `check`: assertions in compiled code, for the debug build alone.
#
# `make debug` and `make sanitize` compile with PCCL_DEBUG. Without it the macro drops its arguments unevaluated, as if
# the line were not there. So a condition must be one plain comparison: Cython computes `and`, `or` and chained
# comparisons before the call, where the macro cannot drop them.
#
# A condition that fails is a defect of this process, never of a peer: the process prints the invariant and aborts.

cdef extern from * nogil:
    """
    #ifdef PCCL_DEBUG
    #include <stdio.h>
    #include <stdlib.h>

    static inline void pccl_fail(const char *invariant)
    {
        fprintf(stderr, "pccl: this does not hold: %s\\n", invariant);
        fflush(stderr);
        abort();
    }

    #define pccl_check(condition, invariant) ((condition) ? (void) 0 : pccl_fail(invariant))
    #define PCCL_CHECKED 1
    #else
    #define pccl_check(condition, invariant) ((void) 0)
    #define PCCL_CHECKED 0
    #endif
    """
    void check "pccl_check" (bint condition, const char *invariant)
    bint CHECKED "PCCL_CHECKED"     # whether this is a debug build, for checks that need more than one comparison
