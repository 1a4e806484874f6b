// SPDX-License-Identifier: Apache-2.0
// MPI_Allreduce in place, two ranks.
#include <mpi.h>

#include "allreduce.h"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  static double us[kMaxCalls];
  char* x = aligned_alloc(64, 64 << 20);
  for (int bf16 = 0; bf16 < 2; bf16++) {
#ifdef MPIX_C_BF16
    const MPI_Datatype type = bf16 ? MPIX_C_BF16 : MPI_FLOAT;
#else
    if (bf16) break;
    const MPI_Datatype type = MPI_FLOAT;
#endif
    for (int a = 1; a < argc; a++) {
      const size_t bytes = strtoull(argv[a], 0, 10), count = bytes / (bf16 ? 2 : 4);
      const int calls = bench_calls(bytes);
      bench_fill(x, bytes, bf16);
      MPI_Allreduce(MPI_IN_PLACE, x, count, type, MPI_SUM, MPI_COMM_WORLD);
      const int right = bench_is_two(x, bytes, bf16);
      memset(x, 0, bytes);
      for (int i = -calls / 10 - 1; i < calls; i++) {
        const double start = bench_now_us();
        MPI_Allreduce(MPI_IN_PLACE, x, count, type, MPI_SUM, MPI_COMM_WORLD);
        if (i >= 0) us[i] = bench_now_us() - start;
      }
      if (rank == 0) bench_print(bf16, bytes, us, calls, right);
    }
  }
  MPI_Finalize();
}
