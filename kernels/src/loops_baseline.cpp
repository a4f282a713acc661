// For any processor of its kind: SSE2 on x86-64, NEON on aarch64.
#define PF_TABLE loops_baseline
#define PF_REGISTER 16
#if defined(__aarch64__)
#define PF_NAME "neon"
#define PF_TILE 6
#define PF_SMALL_TILE 4
#define PF_OUT 1
#define PF_GRAD 4
#define PF_ROW 4
#else
#define PF_NAME "baseline"
#define PF_TILE 2
#define PF_SMALL_TILE 2
#define PF_OUT 1
#define PF_GRAD 2
#define PF_ROW 2
#endif
#include "loops.inc"
