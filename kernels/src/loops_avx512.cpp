// For AVX-512: 32 registers of a block each. Compiled with -march=x86-64-v4.
#define PF_TABLE loops_avx512
#define PF_NAME "avx512"
#define PF_REGISTER 64
#define PF_TILE 14
#define PF_SMALL_TILE 8
#define PF_OUT 2
#define PF_GRAD 16
#define PF_ROW 8
#include "loops.inc"
