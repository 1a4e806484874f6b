// SPDX-License-Identifier: Apache-2.0
// oneCCL's allreduce in place, host buffers, two ranks started by mpirun; the address of its key-value store is handed
// over in a file, which the first argument names.
#include <unistd.h>

#include <fstream>
#include <oneapi/ccl.hpp>
#include <string>

#include "allreduce.h"

int main(int argc, char** argv) {
  const int rank = atoi(getenv("PMI_RANK"));
  ccl::init();
  const std::string file = argv[1];
  ccl::shared_ptr_class<ccl::kvs> kvs;
  ccl::kvs::address_type address;
  if (rank == 0) {
    kvs = ccl::create_main_kvs();
    address = kvs->get_address();
    std::ofstream(file + ".new", std::ios::binary).write(address.data(), address.size());
    rename((file + ".new").c_str(), file.c_str());
  } else {
    for (int i = 0; i < 30000 && access(file.c_str(), R_OK); i++) usleep(1000);
    std::ifstream(file, std::ios::binary).read(address.data(), address.size());
    kvs = ccl::create_kvs(address);
  }
  auto comm = ccl::create_communicator(2, rank, kvs);
  static double us[kMaxCalls];
  char* x = (char*)aligned_alloc(64, 64 << 20);
  for (int bf16 = 0; bf16 < 2; bf16++)
    for (int a = 2; a < argc; a++) {
      const size_t bytes = strtoull(argv[a], 0, 10), count = bytes / (bf16 ? 2 : 4);
      const auto type = bf16 ? ccl::datatype::bfloat16 : ccl::datatype::float32;
      const int calls = bench_calls(bytes);
      bench_fill(x, bytes, bf16);
      ccl::allreduce(x, x, count, type, ccl::reduction::sum, comm).wait();
      const int right = bench_is_two(x, bytes, bf16);
      memset(x, 0, bytes);
      for (int i = -calls / 10 - 1; i < calls; i++) {
        const double start = bench_now_us();
        ccl::allreduce(x, x, count, type, ccl::reduction::sum, comm).wait();
        if (i >= 0) us[i] = bench_now_us() - start;
      }
      if (rank == 0) bench_print(bf16, bytes, us, calls, right);
    }
}
