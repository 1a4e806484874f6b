// SPDX-License-Identifier: Apache-2.0
// Products of 8-bit and 4-bit weights on x86, once for vectors of 256 and of 512 bits: avx2.h and avx512.h include this
// when they have named their instructions on bytes and halves (16 bits). simd.h says what the names mean. With
// ANYACCEL_VNNI four products of bytes are added by one instruction, else by multiplying halves; with ANYACCEL_EMULATE
// that instruction is plain code that gives the same, for tests on machines without it.

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

#ifdef ANYACCEL_VNNI
// VPDPBUSD: sum + a * b, `a` unsigned and `b` signed bytes, 4 a lane; sums wrap around.
inline IVec dot_bytes(IVec sum, IVec a, IVec b) {
#ifndef ANYACCEL_EMULATE
  return dpbusd(sum, a, b);
#else
  const IVec low_a = bits_and(a, broadcast_half(0xff)), high_a = shift_right_halves<8>(a);
  const IVec low_b = sign_shift_right_halves<8>(shift_left_halves<8>(b)), high_b = sign_shift_right_halves<8>(b);
  return add(sum, add(madd_halves(low_a, low_b), madd_halves(high_a, high_b)));
#endif
}

constexpr bool kPairs8 = false, kShift8 = true;
struct Quads {
  IVec v;
};
// Bytes with a sign become the bytes without one that are 128 larger.
inline Quads quads_of(IVec line) { return {bits_xor(line, broadcast_byte(static_cast<char>(0x80)))}; }
inline IVec dot(IVec sum, Quads w, const int8_t* x) { return dot_bytes(sum, w.v, quad_at(x)); }

struct NibbleSum {
  static constexpr bool kOf16Bits = false;
  IVec v;
  static NibbleSum zero() { return {broadcast(0)}; }
  NibbleSum plus(Nibbles w, const int8_t* x) const {
    return {dot_bytes(dot_bytes(v, w.low, quad_at(x)), w.high, quad_at(x + 4))};
  }
  IVec total() const { return v; }
};
#else
// Keeps GCC from adding up in another order, for which it would keep all products in memory.
inline IVec in_place(IVec sum) {
  __asm__("" : "+v"(sum));
  return sum;
}

constexpr bool kPairs8 = true, kShift8 = false;
struct Quads {
  IVec even, odd;  // bytes in the high halves of 16 bits
};
inline Quads quads_of(IVec line) {
  return {shift_left_halves<8>(line), bits_and(line, broadcast_half(static_cast<short>(0xff00)))};
}
inline IVec dot(IVec sum, Quads w, const int16_t* x) {
  return in_place(add(sum, add(madd_halves(w.even, quad_at(x)), madd_halves(w.odd, quad_at(x + 2)))));
}

// The sum over 32 columns, of values 0..15 and activations -127..127: fits 16 bits (8 * 2 * 15 * 127 = 30480).
struct NibbleSum {
  static constexpr bool kOf16Bits = true;
  IVec v;
  static NibbleSum zero() { return {broadcast(0)}; }
  NibbleSum plus(Nibbles w, const int8_t* x) const {
    const IVec low = madd_bytes(w.low, quad_at(x)), high = madd_bytes(w.high, quad_at(x + 4));
    return {in_place(add_halves(v, add_halves(low, high)))};
  }
  IVec total() const { return madd_halves(v, broadcast_half(1)); }
};
#endif

inline Quads load_quads(const uint8_t* p) { return quads_of(load_ints(p)); }
struct Codes {
  Quads low, high;
};
inline Codes load_codes(const uint8_t* p, Table table) {
  const Nibbles bytes = look_up(table, load_nibbles(p));
  return {quads_of(bytes.low), quads_of(bytes.high)};
}

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
