// SPDX-License-Identifier: Apache-2.0
// In which form floats go from host to host: as they are, or in fewer bytes where the network is what is waited for.
//
// bf16: rounded to nearest even, 2 bytes a value; a value is off by at most 2^-8 of itself.
// i8: blocks of 32 values, 10 bits a value. The largest one goes as it is, the others with 8 bits and a common scale
// (Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", 2022; that the few large
// values of a residual must keep their precision: Dettmers, Lewis, Belkada, Zettlemoyer, "LLM.int8()", 2022). A value
// is off by at most 1/254 of the largest one of these others, and what rounding floats adds.
//
// What is decoded has the same bits on every processor: so have sums in the same order. NaN and infinity come out as
// NaN or infinity; in i8 they make their block NaN. The library is built without -ffast-math, which this relies on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace anyaccel::comm {

enum class WireFormat : uint8_t { f32, bf16, i8 };

// "f32", "bf16" or "i8". Throws std::invalid_argument.
WireFormat read_wire_format(const std::string& name);
const char* wire_format_name(WireFormat format);

// Of `count` floats. f32 is not encoded: its floats go as they lie.
size_t encoded_bytes(WireFormat format, size_t count);
// `out` and `in` of encoded_bytes(format, count), aligned to 4 bytes.
void encode(WireFormat format, const float* in, size_t count, uint8_t* out);
void decode(WireFormat format, const uint8_t* in, size_t count, float* out);

}  // namespace anyaccel::comm
