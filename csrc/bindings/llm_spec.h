// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "llm/decoder/spec.h"
#include "llm/model/request.h"

namespace anyaccel::bindings {

// These read the dataclasses of inference/spec/decoder.py and a mapping of options. They throw llm::UsageError, which
// names the field.
llm::DecoderSpec read_spec(const nanobind::handle& spec);
llm::LayerSpec read_layer(const nanobind::handle& layer);
llm::RequestOptions read_options(const nanobind::dict& options);

llm::Format read_format(const std::string& name);
llm::SourceType read_source_type(const std::string& name);
llm::ScaleKind read_scale_kind(const std::string& name);

}  // namespace anyaccel::bindings
