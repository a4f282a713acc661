// For AVX2 with FMA: 16 registers of half a block each. Compiled with -march=x86-64-v3.
#define PF_TABLE loops_avx2
#define PF_NAME "avx2"
#define PF_REGISTER 32
#define PF_TILE 6
#define PF_SMALL_TILE 4
#define PF_OUT 1
#define PF_GRAD 4
#define PF_ROW 4
#include "loops.inc"
