// SPDX-License-Identifier: Apache-2.0
// The vectors of the instruction set that a kernel file is compiled for: ANYACCEL_ISA_VARIANT names it and its header,
// and `simd::ANYACCEL_ISA_VARIANT` is the namespace of the names. All headers have the same ones; where nothing is
// said, they are those of the operation on each lane.
//
//   Vec, IVec, Mask      kLanes floats, as many int32, a truth value for each lane; ANYACCEL_LANES is the same number
//   ANYACCEL_REGISTERS   how many vectors a loop may count on to stay in registers
//   broadcast(x)         x in every lane, of a float or an int32
//   load, store          kLanes floats, anywhere in memory; load_n and store_n: the first n lanes, 0 < n <= kLanes,
//                        where load_n has `other` in the rest
//   fma, fnma            a * b + c and c - a * b. Rounded once where the machine can: only bits of what does not use
//                        them are the same on all instruction sets
//   max, min             the second argument where either is a NaN, or where both are equal
//   sign                 -1 or 1; zero for zero, NaN for NaN
//   select(m, yes, no)   either(m, n) a mask; lanes(m) a number with a bit for each lane
//   sum, largest         of all lanes
//   nearest              to the nearest whole number, ties to even, of |v| below 2^22; larger ones stay as large
//   times_power(v, n)    v * 2^n for whole n that limited_power() has seen; with a mask, zero in the other lanes
//   load_twice(p)        each of kLanes / 2 floats in two neighbouring lanes; swap_pairs(v) changes these two over;
//                        fma_addsub(a, b, c) is a * b - c in even and a * b + c in odd lanes
//   convert              of an int32 to a float
//   load_bf16, load_f16, store_bf16, store_f16, load_i8, load_power
//   even_bf16(p), odd_bf16(p)   of kLanes pairs of bfloat16
//   pack_bf16(a, b), pack_f16(a, b), interleave_bf16(even, odd)   two vectors as 2 * kLanes halves
//   stream(p, v)         past the caches, where p is aligned to a whole vector; stream_fence() after the last one
//
// Products of 8-bit and 4-bit weights, which come in quadruples of columns for each lane (llm/pack/matrix.h):
//   Quads, load_quads(p)   4 columns of int8. kPairs8: activations for them are int16, in pairs (0, 2), (1, 3) of the
//                        4 columns, and products come out 256 times too large; else they are int8, and kShift8 says
//                        whether 128 times their sum comes out too much
//   Nibbles, load_nibbles(p)   8 columns of 4 bits; NibbleSum: their products with activations over at most 32 columns,
//                        of values of 5 bits 16, of 6 bits 8
//   load_bits<b, f>(p)   the same of b bits from bit f of each byte on, four columns, and from f + b on, four more
//   join<s>(a, b)        a + 2^s b, of columns whose bits do not meet
//   Codes, load_codes(p, table)   as load_quads(), of what 8 columns of 4 bits stand for in load_table(16 of int8)
//   column8<I>(p), column4<I>(p)   one of these columns
//   magnitude_bits(x), quantise32(x, factor, q) and the same for 16 groups: 32 floats as 8 bits (llm/kernels/gemv.h)
#define ANYACCEL_TEXT_OF(x) #x
#define ANYACCEL_TEXT(x) ANYACCEL_TEXT_OF(x)
// clang-format off: a space would be a part of the name
#include ANYACCEL_TEXT(simd/ANYACCEL_ISA_VARIANT.h)
// clang-format on
#undef ANYACCEL_TEXT
#undef ANYACCEL_TEXT_OF
