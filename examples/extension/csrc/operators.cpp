// SPDX-License-Identifier: Apache-2.0
// Operators. A dozen that make, view and copy tensors are the device's own; every other one runs torch's CPU kernel
// on copies of its arguments. A vendor starts here as well and then adds kernels where time goes.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "generator.h"
#include "runtime.h"

// Declared here because ATen/autocast_mode.h would double the time that this file compiles.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace simd0 {
namespace {

using at::Tensor;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool is_ours(const Tensor& tensor) { return tensor.device().type() == kDeviceType; }

c10::Device with_index(std::optional<c10::Device> device) {
  const bool indexed = device.has_value() && device->has_index();
  return {kDeviceType, indexed ? device->index() : current_device()};
}

// The same memory as a CPU tensor, for as long as `tensor` lives. Only the simulation can do this.
Tensor host_view(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  const auto& storage = tensor.storage();
  c10::DataPtr bytes(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU));
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes)),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

// New tensors ------------------------------------------------------------------------------------------------

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "simd has strided tensors only, no ", *layout);
  TORCH_CHECK(!pin_memory.value_or(false), "only host memory can be pinned, not that of simd");
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool> pin_memory,
             std::optional<c10::MemoryFormat> format) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                     std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

Tensor& set_empty(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  const c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &device_allocator(), /*resizable=*/true);
  return at::native::set_storage_cpu_(self, storage, 0, {0});
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());  // the storage may grow
  return at::native::resize_(self, size, format);
}

// Copies -----------------------------------------------------------------------------------------------------

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  host_view(target).copy_(host_view(self), non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, /*non_blocking=*/false);
}

c10::Scalar local_scalar(const Tensor& self) { return host_view(self).item(); }

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// Operators for which CPU has no kernel of the same name -----------------------------------------------------

Tensor to_host(const std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? tensor->cpu() : Tensor();
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                   c10::IntArrayRef output_padding, int64_t groups) {
  return at::convolution(input.cpu(), weight.cpu(), to_host(bias), stride, padding, dilation, transposed,
                         output_padding, groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        c10::IntArrayRef stride, c10::IntArrayRef padding,
                                                        c10::IntArrayRef dilation, bool transposed,
                                                        c10::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  const auto bias_sizes = std::array<int64_t, 1>{grad.size(1)};
  auto [d_input, d_weight, d_bias] =
      at::convolution_backward(grad.cpu(), input.cpu(), weight.cpu(), c10::IntArrayRef(bias_sizes), stride, padding,
                               dilation, transposed, output_padding, groups, mask);
  const auto back = [&](const Tensor& host) { return host.defined() ? host.to(input.device()) : host; };
  return {back(d_input), back(d_weight), back(d_bias)};
}

// Random numbers ---------------------------------------------------------------------------------------------

// It has no generator argument, so the CPU kernel would draw from the CPU's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(c10::kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// Puts the CPU generator inside the device's generator where the CPU kernel looks for one.
void lend_generator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  auto values = torch::jit::last(*stack, arguments.size());
  c10::DeviceIndex index = current_device();
  for (const auto& value : values) {
    if (value.isTensor() && value.toTensor().defined() && is_ours(value.toTensor())) {
      index = value.toTensor().get_device();
      break;
    }
  }
  const auto optional_generator = c10::OptionalType::create(c10::GeneratorType::get());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (*arguments[i].type() != *optional_generator) continue;
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    const auto generator = value.isNone() ? default_generator(index) : value.toGenerator();
    TORCH_CHECK(generator.device().type() == kDeviceType, op.schema().name(), ": a tensor on simd needs a generator",
                " of simd, not of ", generator.device());
    value = host_generator(generator);
  }
}

// Autocast ---------------------------------------------------------------------------------------------------

// Runs an operator with its floating-point arguments cast, outside of autocast.
template <bool kToFloat32>
void cast_and_run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard outside(c10::DispatchKey::AutocastPrivateUse1);
  const auto dtype = kToFloat32 ? c10::kFloat : at::autocast::get_autocast_dtype(kDeviceType);
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const Tensor tensor = value.toTensor();
    const bool casts = is_ours(tensor) && tensor.is_floating_point() && tensor.scalar_type() != c10::kDouble;
    if (casts) value = tensor.to(dtype);
  }
  op.callBoxed(stack);
}

constexpr std::array kInLowPrecision = {
    "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm", "scaled_dot_product_attention",
};
constexpr std::array kInFloat32 = {
    "binary_cross_entropy_with_logits",
    "cross_entropy_loss",
    "exp",
    "group_norm",
    "layer_norm",
    "log",
    "log_softmax.int",
    "mse_loss",
    "nll_loss",
    "pow.Tensor_Scalar",
    "prod",
    "rsqrt",
    "softmax.int",
    "sum",
};

// Fallback ---------------------------------------------------------------------------------------------------

// [fallback]
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) lend_generator(op, stack);
  at::native::cpu_fallback(op, stack);  // copies the arguments to the CPU, and the results back
}
// [/fallback]

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("set_", TORCH_FN(set_empty));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& {
    const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
    return at::native::set_storage_cpu_(self, source, 0, elements);
  });
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("native_dropout", TORCH_FN(native_dropout));
  library.impl("convolution_overrideable", TORCH_FN(convolution));
  library.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name : kInLowPrecision) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_and_run<false>>());
  }
  for (const char* name : kInFloat32) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_and_run<true>>());
  }
}

// Left to torch, a lazily conjugated or negated tensor would be resolved first, by a clone, by this very copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace simd0
