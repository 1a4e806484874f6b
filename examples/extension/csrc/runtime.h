// SPDX-License-Identifier: Apache-2.0
// The simulated device: what a vendor's driver library would be. It knows c10 (devices, allocators), no operators.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

namespace simd0 {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceIndex kPhysicalDevices = 2;
inline constexpr size_t kMemoryBytes = size_t{4} << 30;  // of each device

// Devices that SIMD0_VISIBLE_DEVICES leaves to this process; opens nothing.
c10::DeviceIndex device_count() noexcept;
// Raises when the process has no device of this index.
void check_index(c10::DeviceIndex index);
// Number of the physical device behind an index.
int physical_device(c10::DeviceIndex index);

c10::DeviceIndex current_device() noexcept;
void set_device(c10::DeviceIndex index);
// Whether memory of the device has been used, which is what a context is for.
bool has_context(c10::DeviceIndex index) noexcept;

// Memory of the current device.
c10::DeviceAllocator& device_allocator();
// Host memory that the device could read by itself.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);
// Index of the device that owns this address, -1 when none does.
c10::DeviceIndex owner(const void* address);

}  // namespace simd0
