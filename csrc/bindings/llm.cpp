// SPDX-License-Identifier: Apache-2.0
// Bindings of the native decoder. Memory is passed as addresses; the Python callers check dtype, contiguity and size
// first.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "bindings/external_model.h"
#include "bindings/llm_spec.h"
#include "bindings/translate.h"
#include "comm/host_links.h"
#include "comm/transport.h"
#include "llm/attention/paged_attention.h"
#include "llm/decoder/linear.h"
#include "llm/errors.h"
#include "llm/kernels/bandwidth.h"
#include "llm/model/decoder_model.h"
#include "llm/model/feed.h"
#include "llm/model/model.h"
#include "llm/model/request.h"
#include "llm/pack/quantise.h"
#include "simd/isa.h"

namespace nb = nanobind;
using namespace anyaccel::llm;
using namespace anyaccel::bindings;

namespace {

void translate(const std::exception_ptr& pending, void*) {
  try {
    std::rethrow_exception(pending);
  } catch (const anyaccel::comm::CommError& error) {
    set_error(python_class(error.kind), error.what());
  } catch (const OutOfCache& error) {
    set_error("ModelError", error.what());
  } catch (const ModelError& error) {
    set_error("ModelError", error.what());
  } catch (const std::invalid_argument& error) {
    set_error("UsageError", error.what());
  } catch (const std::system_error& error) {
    set_system_error(error);
  }
}

std::vector<std::tuple<std::string, int64_t, int64_t>> wanted(const std::vector<WantedWeight>& weights) {
  std::vector<std::tuple<std::string, int64_t, int64_t>> found;
  for (const WantedWeight& each : weights) found.emplace_back(each.name, each.rows, each.cols);
  return found;
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Values read_values(const std::string& name) {
  if (name == "f32") return Values::f32;
  if (name == "f16") return Values::f16;
  if (name == "bf16") return Values::bf16;
  throw UsageError("type '" + name + "' is unknown; known are f32, f16, bf16");
}

CacheFormat read_cache_format(const std::string& name) {
  if (name == "f32") return CacheFormat::f32;
  if (name == "bf16") return CacheFormat::bf16;
  if (name == "i8") return CacheFormat::i8;
  if (name == "i4") return CacheFormat::i4;
  throw UsageError("cache format '" + name + "' is unknown; known are f32, bf16, i8, i4");
}

FileProgress reporter(const nb::object& progress) {
  if (progress.is_none()) return {};
  return [&progress](size_t done) {
    const nb::gil_scoped_acquire gil;
    progress(done);
  };
}

const char* finish_name(Request::Finish finish) {
  switch (finish) {
    case Request::Finish::end:
      return "end";
    case Request::Finish::length:
      return "length";
    case Request::Finish::stopped:
      return "stopped";
    case Request::Finish::no:
      break;
  }
  return "";
}

using MatrixTuple = std::tuple<std::string, int64_t, int64_t, std::string, int, bool, std::string>;

std::shared_ptr<DecoderModel> make_model(const nb::handle& spec, const std::vector<MatrixTuple>& matrices,
                                         const std::vector<std::pair<std::string, int64_t>>& vectors, int threads,
                                         const std::string& cache_format, size_t cache_limit_bytes, size_t memory) {
  std::vector<MatrixEntry> matrix_entries;
  for (const auto& [name, rows, cols, format, group, minimum, scales] : matrices)
    matrix_entries.push_back({name, rows, cols, read_format(format), group, minimum, read_scale_kind(scales)});
  std::vector<VectorEntry> vector_entries;
  for (const auto& [name, count] : vectors) vector_entries.push_back({name, count});
  DecoderSpec decoder = read_spec(spec);
  const CacheFormat format = read_cache_format(cache_format);
  const nb::gil_scoped_release no_gil;
  auto model = std::make_shared<DecoderModel>(std::move(decoder), matrix_entries, vector_entries, threads, format,
                                              cache_limit_bytes, memory);
  model->set_interrupt_check(check_signals);
  return model;
}

std::map<std::string, std::pair<double, int64_t>> profile(Model& model, bool enabled) {
  const Profile::Entries entries = model.profile(enabled);
  std::map<std::string, std::pair<double, int64_t>> result;
  for (size_t i = 0; i < entries.size(); ++i)
    if (entries[i].calls > 0) result[kWorkNames[i]] = {entries[i].seconds, entries[i].calls};
  return result;
}

// Wraps a Python function of lists of tokens for a step, which runs without the interpreter's lock.
template <class... Lists>
std::function<std::vector<int64_t>(const Lists&...)> of_tokens(nb::object function) {
  return [held = hold(std::move(function))](const Lists&... lists) {
    const nb::gil_scoped_acquire gil;
    return nb::cast<std::vector<int64_t>>((*held)(lists...));
  };
}

void set_draft(Model& model, std::shared_ptr<Model> draft, nb::object to_draft, nb::object from_draft) {
  using Tokens = std::vector<int64_t>;
  DraftTranslation translation;
  if (to_draft.is_none() != from_draft.is_none()) throw UsageError("set_draft: to_draft and from_draft go together");
  if (!to_draft.is_none()) {
    translation.to_draft = of_tokens<Tokens>(std::move(to_draft));
    translation.from_draft = of_tokens<Tokens, Tokens, Tokens>(std::move(from_draft));
  }
  const nb::gil_scoped_release no_gil;
  model.set_draft(std::move(draft), std::move(translation));
}

using ScoreTuple = std::tuple<int64_t, float, std::vector<std::pair<int64_t, float>>>;

std::vector<ScoreTuple> scores(const std::vector<TokenScore>& found) {
  std::vector<ScoreTuple> result;
  result.reserve(found.size());
  for (const TokenScore& one : found) result.emplace_back(one.token, one.logprob, one.top);
  return result;
}

void bind_model(nb::module_& m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Model>(m, "Model")
      .def_prop_ro("weight_bytes", &Model::weight_bytes, no_gil)
      .def_prop_ro("threads", &Model::threads)
      .def("create_segment", &Model::create_segment, nb::arg("timeout_s"), nb::arg("anonymous") = false,
           nb::arg("hosts") = std::vector<int>(), nb::arg("addresses") = std::vector<std::string>(),
           nb::arg("wire_dtype") = "f32", nb::arg("transport") = "", nb::arg("socket") = -1, no_gil)
      .def("connect", &Model::connect, nb::arg("names"), nb::arg("pids"), no_gil)
      .def("unlink", &Model::unlink, no_gil)
      .def("shared", &Model::shared, nb::arg("value"), no_gil)
      .def("set_draft", &set_draft, nb::arg("draft").none(), nb::arg("to_draft") = nb::none(),
           nb::arg("from_draft") = nb::none())
      .def_prop_ro("draft_cost", &Model::draft_cost, no_gil)
      .def_prop_ro("draft_can_pay", &Model::draft_can_pay, no_gil)
      .def_prop_ro("draft_work", &Model::draft_work, no_gil)
      .def("step", &Model::step, nb::arg("requests"), nb::arg("limits") = std::vector<int64_t>(),
           nb::arg("exact") = false, no_gil)
      .def(
          "steps",
          [](Model& self, const std::vector<Request*>& requests, int64_t most, TokenFeed& feed, int64_t tag) {
            Steps steps = self.steps(requests, most, feed, tag);
            return std::pair(std::move(steps.tokens), steps.fed);
          },
          nb::arg("requests"), nb::arg("most"), nb::arg("feed"), nb::arg("tag"), no_gil)
      .def("create", &Model::create, no_gil)
      .def("fork", &Model::fork, nb::arg("sequence"), nb::arg("tokens"), no_gil)
      .def("truncate", &Model::truncate, nb::arg("sequence"), nb::arg("tokens"), no_gil)
      .def("destroy", &Model::destroy, nb::arg("sequence"), no_gil)
      .def("length", &Model::length, nb::arg("sequence"), no_gil)
      .def(
          "forward",
          [](Model& self, const std::vector<int>& sequences, const std::vector<int64_t>& counts, uintptr_t tokens,
             uintptr_t logits, const std::vector<int64_t>& rows) {
            self.forward(sequences, counts, pointer<const int64_t>(tokens), pointer<float>(logits), rows);
          },
          nb::arg("sequences"), nb::arg("counts"), nb::arg("tokens"), nb::arg("logits"), nb::arg("rows"), no_gil)
      .def("cache_bytes_per_state", &Model::cache_bytes_per_state, no_gil)
      .def("cache_bytes_per_token", &Model::cache_bytes_per_token, no_gil)
      .def_prop_ro("cache_used_bytes", &Model::cache_used_bytes, no_gil)
      .def_prop_ro("cache_reserved_bytes", &Model::cache_reserved_bytes, no_gil)
      .def_prop_ro("cache_limit_bytes", &Model::cache_limit_bytes, no_gil)
      .def("profile", &profile, nb::arg("enabled"), no_gil);
  nb::class_<PagedAttention>(m, "PagedAttention")
      .def(
          "__init__",
          [](PagedAttention* self, const std::vector<std::tuple<int, int, int, int>>& layers,
             const std::string& cache_format, size_t limit_bytes, int threads) {
            std::vector<AttentionShape> shapes;
            for (const auto& [heads, kv_heads, head_dim, value_dim] : layers)
              shapes.push_back({heads, kv_heads, head_dim, value_dim});
            new (self) PagedAttention(std::move(shapes), read_cache_format(cache_format), limit_bytes, threads);
          },
          nb::arg("layers"), nb::arg("cache_format"), nb::arg("limit_bytes"), nb::arg("threads"))
      .def("create", [](PagedAttention& self) { return self.cache().create(); })
      .def("destroy", [](PagedAttention& self, int sequence) { self.cache().destroy(sequence); })
      .def("fork",
           [](PagedAttention& self, int sequence, int64_t tokens) { return self.cache().fork(sequence, tokens); })
      .def("truncate",
           [](PagedAttention& self, int sequence, int64_t tokens) { self.cache().truncate(sequence, tokens); })
      .def("length", [](PagedAttention& self, int sequence) { return self.cache().length(sequence); })
      .def("extend_bytes", [](PagedAttention& self, int sequence,
                              int64_t tokens) { return self.cache().extend_bytes(sequence, tokens); })
      .def_prop_ro("token_bytes", [](PagedAttention& self) { return self.cache().token_bytes(); })
      .def_prop_ro("used_bytes", [](PagedAttention& self) { return self.cache().used_bytes(); })
      .def_prop_ro("reserved_bytes", [](PagedAttention& self) { return self.cache().reserved_bytes(); })
      .def(
          "begin",
          [](PagedAttention& self, const std::vector<std::tuple<int, int64_t, int64_t>>& segments) {
            std::vector<PagedAttention::Segment> own;
            for (const auto& [sequence, start, tokens] : segments) own.push_back({sequence, start, tokens});
            self.begin(own);
          },
          nb::arg("segments"))
      .def(
          "attend",
          [](PagedAttention& self, int layer, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, float scale,
             float softcap, int window, int chunk, uintptr_t sinks) {
            AttentionOptions options{};
            options.scale = scale;
            options.softcap = softcap;
            options.window = window;
            options.chunk = chunk;
            options.sinks = pointer<const float>(sinks);
            self.attend(layer, options, pointer<const float>(q), pointer<const float>(k), pointer<const float>(v),
                        pointer<float>(out));
          },
          nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("scale"),
          nb::arg("softcap"), nb::arg("window"), nb::arg("chunk"), nb::arg("sinks"), no_gil);
  nb::class_<DecoderModel, Model>(m, "DecoderModel")
      .def(nb::new_(&make_model), nb::arg("spec"), nb::arg("matrices"), nb::arg("vectors"), nb::arg("threads"),
           nb::arg("cache_format"), nb::arg("cache_limit_bytes"), nb::arg("memory") = 0)
      .def(
          "set_rows",
          [](DecoderModel& self, const std::string& name, int64_t first, int64_t count, uintptr_t address,
             const std::string& type, int64_t row_stride, int64_t col_stride,
             const std::optional<std::vector<int64_t>>& order) {
            if (order && order->size() != static_cast<size_t>(std::max<int64_t>(count, 0)))
              throw UsageError("set_rows of '" + name + "': order has " + std::to_string(order->size()) +
                               " rows, count is " + std::to_string(count));
            const Source source{pointer<const void>(address), read_source_type(type), row_stride, col_stride};
            self.set_rows(name, first, count, source, order ? order->data() : nullptr);
          },
          nb::arg("name"), nb::arg("first"), nb::arg("count"), nb::arg("address"), nb::arg("type"),
          nb::arg("row_stride"), nb::arg("col_stride") = 0, nb::arg("order") = nb::none(), no_gil)
      .def(
          "set_quantised_rows",
          [](DecoderModel& self, const std::string& name, int64_t first, int64_t count, uintptr_t q, uintptr_t scales,
             uintptr_t minima) {
            self.set_quantised_rows(name, first, count, pointer<const uint8_t>(q), pointer<const float>(scales),
                                    pointer<const float>(minima));
          },
          nb::arg("name"), nb::arg("first"), nb::arg("count"), nb::arg("q"), nb::arg("scales"), nb::arg("minima") = 0,
          no_gil)
      .def(
          "set_vector",
          [](DecoderModel& self, const std::string& name, int64_t first, int64_t count, uintptr_t address,
             const std::string& type, int64_t stride, float plus) {
            const SourceType source = read_source_type(type);
            if (stride == 0) stride = static_cast<int64_t>(source_row_bytes(source, 1));
            self.set_vector(name, first, count, pointer<const void>(address), source, stride, plus);
          },
          nb::arg("name"), nb::arg("first"), nb::arg("count"), nb::arg("address"), nb::arg("type"),
          nb::arg("stride") = 0, nb::arg("plus") = 0.0, no_gil)
      .def(
          "write",
          [](DecoderModel& self, int fd, int64_t offset, const nb::object& progress) {
            const FileProgress report = reporter(progress);
            const nb::gil_scoped_release release;
            return self.write(fd, offset, report);
          },
          nb::arg("fd"), nb::arg("offset"), nb::arg("progress") = nb::none())
      .def(
          "read",
          [](DecoderModel& self, int fd, int64_t offset, const std::vector<uint64_t>& checksums,
             const nb::object& progress) {
            const FileProgress report = reporter(progress);
            const nb::gil_scoped_release release;
            return self.read(fd, offset, checksums, report);
          },
          nb::arg("fd"), nb::arg("offset"), nb::arg("checksums"), nb::arg("progress") = nb::none())
      .def("stream_to", &DecoderModel::stream_to, nb::arg("fd"), nb::arg("offset"), no_gil)
      .def_prop_ro("resident_bytes", &DecoderModel::resident_bytes)
      .def("expert_stats",
           [](DecoderModel& self) -> std::optional<std::map<std::string, double>> {
             const auto stats = [&] {
               const nb::gil_scoped_release release;
               return self.expert_stats();
             }();
             if (!stats) return std::nullopt;
             return std::map<std::string, double>{
                 {"used", static_cast<double>(stats->used)},   {"missed", static_cast<double>(stats->missed)},
                 {"ahead", static_cast<double>(stats->ahead)}, {"ahead_used", static_cast<double>(stats->ahead_used)},
                 {"bytes", static_cast<double>(stats->bytes)}, {"slot_bytes", static_cast<double>(stats->slot_bytes)},
                 {"waited_seconds", stats->waited_seconds}};
           })
      .def("finish", &DecoderModel::finish, no_gil)
      .def("borrow", &DecoderModel::borrow, nb::arg("model"), nb::arg("tokens") = std::vector<int64_t>(), no_gil)
      .def(
          "encode",
          [](DecoderModel& self, const std::vector<int64_t>& counts, uintptr_t tokens, uintptr_t types,
             uintptr_t hidden) {
            self.encode(counts, pointer<const int64_t>(tokens), pointer<const int64_t>(types), pointer<float>(hidden));
          },
          nb::arg("counts"), nb::arg("tokens"), nb::arg("types"), nb::arg("hidden"), no_gil);
  nb::class_<ExternalModel, Model>(m, "ExternalModel")
      .def(nb::new_([](const nb::handle& spec, nb::object executor) {
             auto model = std::make_shared<ExternalModel>(read_spec(spec), std::move(executor));
             model->set_interrupt_check(check_signals);
             return model;
           }),
           nb::arg("spec"), nb::arg("executor"))
      .def_prop_ro("executor", &ExternalModel::executor);
}

std::vector<uintptr_t> addresses(const std::vector<uint8_t*>& pages) {
  std::vector<uintptr_t> result;
  for (uint8_t* page : pages) result.push_back(reinterpret_cast<uintptr_t>(page));
  return result;
}

void bind_request(nb::module_& m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Request>(m, "Request")
      .def(nb::new_([](std::shared_ptr<Model> model, std::vector<int64_t> prompt, const nb::dict& options,
                       std::shared_ptr<Request> prefix, bool keep_logits) {
             RequestOptions read = read_options(options);
             const nb::gil_scoped_release release;
             return std::make_shared<Request>(std::move(model), std::move(prompt), std::move(read), std::move(prefix),
                                              keep_logits);
           }),
           nb::arg("model"), nb::arg("prompt"), nb::arg("options"), nb::arg("prefix") = nb::none(),
           nb::arg("keep_logits") = false)
      .def_prop_ro("tokens", &Request::tokens, no_gil)
      .def_prop_ro("prompt_length", &Request::prompt_length, no_gil)
      .def_prop_ro(
          "finished", [](const Request& self) { return finish_name(self.finished()); }, no_gil)
      .def("finish", &Request::finish, no_gil)
      .def("extend", &Request::extend, nb::arg("tokens"), nb::arg("max_new_tokens") = 0, no_gil)
      .def("share", &Request::share, nb::arg("other"), nb::arg("tokens"), no_gil)
      .def(
          "pages",
          [](const Request& self, int64_t first, int64_t count) { return addresses(self.pages(first, count)); },
          nb::arg("first"), nb::arg("count"), no_gil)
      .def(
          "restore", [](Request& self, int64_t tokens) { return addresses(self.restore(tokens)); }, nb::arg("tokens"),
          no_gil)
      .def("shrink", &Request::shrink, nb::arg("tokens"), no_gil)
      .def("keep", &Request::keep, nb::arg("tokens"), no_gil)
      .def_prop_ro("cached", &Request::cached, no_gil)
      .def(
          "set_mask",
          [](Request& self, const nb::bytes& mask) {
            std::vector<uint32_t> words(mask.size() / sizeof(uint32_t));
            std::memcpy(words.data(), mask.c_str(), words.size() * sizeof(uint32_t));
            const nb::gil_scoped_release release;
            self.set_mask(std::move(words));
          },
          nb::arg("mask"))
      .def_prop_ro("drafts", &Request::drafts, no_gil)
      .def(
          "take_scores", [](Request& self) { return scores(self.take_scores()); }, no_gil)
      .def(
          "prompt_scores", [](const Request& self) { return scores(self.prompt_scores()); }, no_gil)
      .def("embedding", &Request::embedding, nb::arg("normalize") = true, no_gil)
      .def(
          "copy_logits", [](const Request& self, uintptr_t address) { self.copy_logits(pointer<float>(address)); },
          nb::arg("address"), no_gil);
}

void bind_feed(nb::module_& m) {
  nb::class_<TokenFeed>(m, "TokenFeed")
      .def(nb::init<>())
      .def("fileno", &TokenFeed::fileno)
      .def("take", &TokenFeed::take)
      .def("stop", &TokenFeed::stop, nb::arg("value") = true);
}

void bind_linear(nb::module_& m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Linear>(m, "Linear")
      .def(
          "__init__",
          [](Linear* self, int64_t rows, int64_t cols, const std::string& format, int group, bool minimum,
             const std::string& scales) {
            new (self) Linear(Shape{read_format(format), rows, cols, group, minimum, read_scale_kind(scales)});
          },
          nb::arg("rows"), nb::arg("cols"), nb::arg("format"), nb::arg("group") = 0, nb::arg("minimum") = false,
          nb::arg("scales") = "halves")
      .def(
          "set_rows",
          [](Linear& self, int64_t first, int64_t count, uintptr_t address, const std::string& type, int64_t row_stride,
             int64_t col_stride) {
            self.set_rows(first, count,
                          Source{pointer<const void>(address), read_source_type(type), row_stride, col_stride});
          },
          nb::arg("first"), nb::arg("count"), nb::arg("address"), nb::arg("type"), nb::arg("row_stride"),
          nb::arg("col_stride") = 0, no_gil)
      .def(
          "set_quantised_rows",
          [](Linear& self, int64_t first, int64_t count, uintptr_t q, uintptr_t scales, uintptr_t minima) {
            self.set_quantised_rows(first, count, pointer<const uint8_t>(q), pointer<const float>(scales),
                                    pointer<const float>(minima));
          },
          nb::arg("first"), nb::arg("count"), nb::arg("q"), nb::arg("scales"), nb::arg("minima") = 0, no_gil)
      .def(
          "multiply",
          [](const Linear& self, uintptr_t x, uintptr_t y, int64_t tokens, const std::string& type, uintptr_t bias) {
            self.multiply(pointer<const void>(x), pointer<void>(y), tokens, read_values(type),
                          pointer<const float>(bias));
          },
          nb::arg("x"), nb::arg("y"), nb::arg("tokens"), nb::arg("type"), nb::arg("bias") = 0, no_gil)
      .def(
          "copy_rows",
          [](const Linear& self, uintptr_t rows, int64_t count, uintptr_t y, const std::string& type) {
            self.copy_rows(pointer<const int64_t>(rows), count, pointer<void>(y), read_values(type));
          },
          nb::arg("rows"), nb::arg("count"), nb::arg("y"), nb::arg("type"), no_gil)
      .def_prop_ro("bytes", &Linear::bytes);
  m.def(
      "rms_norm",
      [](uintptr_t x, uintptr_t y, int64_t rows, int64_t cols, const std::string& type, uintptr_t weight, float eps) {
        rms_norm(pointer<const void>(x), pointer<void>(y), rows, cols, read_values(type), pointer<const float>(weight),
                 eps);
      },
      nb::arg("x"), nb::arg("y"), nb::arg("rows"), nb::arg("cols"), nb::arg("type"), nb::arg("weight"), nb::arg("eps"),
      no_gil);
}

std::tuple<double, double> quantise(uintptr_t address, const std::string& type, int64_t row_stride, int64_t rows,
                                    int64_t cols, const std::string& format, int group, bool minimum, uintptr_t q,
                                    uintptr_t scales, uintptr_t minima) {
  const QuantiseError error = quantise_rows(Shape{read_format(format), rows, cols, group, minimum},
                                            Source{pointer<const void>(address), read_source_type(type), row_stride, 0},
                                            pointer<uint8_t>(q), pointer<float>(scales), pointer<float>(minima));
  return {error.squared_error, error.squared_sum};
}

}  // namespace

NB_MODULE(_llm, m) {
  nb::set_leak_warnings(false);  // a model may live until the interpreter ends
  nb::register_exception_translator(translate);
  // Each weight is (name, rows, cols), with cols 0 for vectors; see llm/decoder/weights.h.
  m.def(
      "outer_weights", [](const nb::handle& spec) { return wanted(outer_weights(read_spec(spec))); }, nb::arg("spec"));
  m.def(
      "layer_weights",
      [](const nb::handle& layer, int64_t hidden) { return wanted(layer_weights(read_layer(layer), hidden)); },
      nb::arg("layer"), nb::arg("hidden"));
  m.def(
      "end_transports",
      [] {
        anyaccel::comm::HostLinks::leave_all();
        anyaccel::comm::end_transports();
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("isa", [] { return anyaccel::isa_name(anyaccel::selected_isa()); });
  bind_model(m);
  bind_request(m);
  bind_feed(m);
  bind_linear(m);
  m.def("read_bandwidth", &read_bandwidth, nb::arg("bytes"), nb::arg("threads") = 0, nb::arg("rounds") = 5,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("quantise", &quantise, nb::arg("address"), nb::arg("type"), nb::arg("row_stride"), nb::arg("rows"),
        nb::arg("cols"), nb::arg("format"), nb::arg("group"), nb::arg("minimum"), nb::arg("q"), nb::arg("scales"),
        nb::arg("minima"), nb::call_guard<nb::gil_scoped_release>());
}
