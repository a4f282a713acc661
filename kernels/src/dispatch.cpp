// Which set of loops this processor can run, asked of the processor itself.
#include <cstdlib>
#include <cstring>

#include "loops.h"

namespace pf {

const Loops* loops_here() {
  const Loops* best = loops_baseline();
#if defined(__x86_64__)
  __builtin_cpu_init();
  const char* most = std::getenv("PROTOFLEET_KERNELS");  // baseline or avx2: for tests of what other processors run
  const bool any = most == nullptr || *most == 0;
  if (!any && std::strcmp(most, "baseline") == 0) return best;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = loops_avx2();
  if (!any && std::strcmp(most, "avx2") == 0) return best;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
    best = loops_avx512();
#endif
  return best;
}

}  // namespace pf
