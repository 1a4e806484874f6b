// SPDX-License-Identifier: Apache-2.0
// Part of each op's library: what it was built from, for the loader to compare (anyaccel/ops/in_tree.py).

#ifndef ANYACCEL_VARIANT
#error "the build defines ANYACCEL_VARIANT"
#endif

extern "C" {
__attribute__((visibility("default"))) extern const char anyaccel_variant[];
const char anyaccel_variant[] = ANYACCEL_VARIANT;
}
