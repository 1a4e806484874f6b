// SPDX-License-Identifier: Apache-2.0
#include "llm/kernels/gemm.h"

#include <algorithm>

#include "common/team.h"
#include "llm/kernels/gemm_kernels.h"
#include "llm/kernels/gemm_select.h"
#include "llm/kernels/gemv.h"
#include "simd/pick.h"

namespace anyaccel::llm {
namespace {

constexpr int kPassTokens = 1024;  // few enough that their results stay in a cache between passes over the columns
constexpr size_t kScratchBytes = size_t{640} << 10;
// Blocks of bfloat16 that panels are multiplied with in turn where they are. A pass over them takes the same few sets
// of the L2 cache of each, since they are a power of two apart in most models: fewer than that cache has ways.
constexpr int64_t kLineBlocks = 4;

// Unpacked weights. Static memory, so that no call can fail for want of it.
alignas(64) thread_local uint8_t scratch[kScratchBytes];
// Threads take each other's pieces of a product when each has so many at least. Looking for what is left costs a cache
// line a thread.
constexpr int64_t kSharedPieces = 4;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How tokens are divided into panels.
struct Panels {
  int tokens;
  int full;  // tokens of a panel when all but the last are full; else 0
  int count;

  Panels(const GemmKernels& kernels, int token_count)
      : tokens(token_count),
        full(kernels.full_panels ? kernels.panel_tokens : 0),
        count(static_cast<int>(divide_up(token_count, kernels.panel_tokens))) {}
  int begin(int panel) const {
    return full != 0 ? std::min(panel * full, tokens) : static_cast<int>(part_of(tokens, panel, count).begin);
  }
};

int64_t panel_bytes(const GemmKernels& kernels, const Shape& shape) {
  return divide_up(shape.padded_cols() / kUnit * kernels.activation_bytes * kernels.panel_tokens, 64) * 64;
}

// Writes `units` units of a block of weights to `to`, in the form that these kernels multiply.
void unpack(const GemmKernels& kernels, const GemvKernels& gemv, const BlockLayout& layout, const uint8_t* block,
            int64_t unit, int64_t units, uint8_t* to) {
  // Those of floats read i8 and i4 only.
  const bool known = kernels.operands == GemmKernels::Operands::bytes
                         ? is_quantised(layout.format)
                         : layout.format == Format::i8 || layout.format == Format::i4;
  if (known && kernels.unpack != nullptr)
    kernels.unpack(layout, block, unit, units, to);
  else if (kernels.operands == GemmKernels::Operands::floats)
    gemv.unpack(layout, block, unit * kUnit, (unit + units) * kUnit, reinterpret_cast<float*>(to));
  else
    gemv.unpack_bf16(layout, block, unit * kUnit, (unit + units) * kUnit, reinterpret_cast<uint16_t*>(to));
}

// How many parts the rows are divided into, and how many the tokens: each thread has one field of the grid.
struct Grid {
  int rows, tokens;
};

// The grid whose largest field has the least to do. Every field unpacks the weights of its rows, so that dividing only
// the tokens would unpack all weights many times.
Grid grid_of(const GemmKernels& kernels, int64_t row_tiles, int panels, int parts) {
  Grid best{1, 1};
  int64_t least = INT64_MAX;
  for (int rows = parts; rows >= 1; --rows) {
    const int tokens = parts / rows;
    const int64_t cost =
        divide_up(row_tiles, rows) * (divide_up(panels, tokens) * kernels.panel_tokens + kernels.unpack_cost);
    if (cost < least) {
      least = cost;
      best = {rows, tokens};
    }
  }
  return best;
}

struct Field {
  int64_t first_block, last_block, chunks;
  Range panels;
};

// Where a pass over some blocks of weights begins.
struct Pass {
  int64_t block, unit;
};

// The weights of the pass that comes next, which the panels of the present one fetch, each a share.
class NextPass {
 public:
  NextPass(const Matrix& w, const BlockLayout& layout, const GemmKernels& kernels, Pass next, int64_t last_block,
           int64_t units, int64_t panels)
      : blocks_(kernels.tile_blocks), block_bytes_(static_cast<int64_t>(layout.block_bytes)), weights_(w.block(0)) {
    if (next.block >= last_block) return;
    weights_ += layout.unit_at(next.unit * kUnit) + static_cast<size_t>(next.block * block_bytes_);
    share_ = divide_up(divide_up(block_bytes_ * units * kUnit, layout.padded_cols), divide_up(panels, blocks_));
    share_ = divide_up(share_, 64) * 64;
  }
  // Of panel 0, 1, ...: a part of one block of each tile.
  void share(int64_t panel, GemmTile& to) const {
    to.next_weights = weights_ + panel % blocks_ * block_bytes_ + panel / blocks_ * share_;
    to.next_stride = blocks_ * block_bytes_;
    to.next_bytes = share_;
  }

 private:
  int64_t blocks_, block_bytes_, share_ = 0;
  const uint8_t* weights_;
};

}  // namespace

size_t gemm_bytes_on(const GemmKernels& kernels, const Shape& shape, int64_t tokens) {
  return static_cast<size_t>(divide_up(tokens, kernels.panel_tokens)) *
         static_cast<size_t>(panel_bytes(kernels, shape));
}

void gemm_prepare_on(const GemmKernels& kernels, const Shape& shape, const float* x, int64_t stride,
                     const int32_t* rows, int tokens, uint8_t* data, int part, int parts) noexcept {
  const Panels panels(kernels, tokens);
  const Range mine = part_of(panels.count, part, parts);
  for (int64_t p = mine.begin; p < mine.end; ++p) {
    const int first = panels.begin(static_cast<int>(p)), last = panels.begin(static_cast<int>(p) + 1);
    kernels.pack(rows != nullptr ? x : x + first * stride, stride, rows != nullptr ? rows + first : nullptr,
                 last - first, shape.cols, shape.padded_cols() / kUnit, data + p * panel_bytes(kernels, shape));
  }
}

void gemm_multiply_on(const GemmKernels& kernels, const GemvKernels& gemv, const Matrix& w, const uint8_t* data,
                      int tokens, const Output& out, int part, int parts, const Sharing& sharing) noexcept {
  const Shape& shape = w.shape();
  const BlockLayout layout = layout_of(shape);
  const Panels panels(kernels, tokens);
  const int64_t row_tiles = divide_up(shape.blocks(), kernels.tile_blocks);
  const Grid grid = grid_of(kernels, row_tiles, panels.count, parts);

  // Passes over the columns, of nearly equal size.
  const int64_t total = layout.padded_cols / kUnit;
  const int64_t pass = divide_up(total, divide_up(total, kernels.units));
  const bool own_lines = shape.format == Format::bf16 && kernels.multiply_bf16 != nullptr;
  const bool in_place = own_lines || (kernels.operands == GemmKernels::Operands::pairs && shape.format == Format::bf16);
  const bool symmetric = kernels.multiply_symmetric != nullptr && !shape.minimum;
  const auto multiply = own_lines ? kernels.multiply_bf16 : symmetric ? kernels.multiply_symmetric : kernels.multiply;
  const int64_t fitting =
      own_lines ? kLineBlocks
                : static_cast<int64_t>(std::min(kernels.cache_bytes, kScratchBytes)) / (pass * kernels.weight_bytes);
  const int64_t chunk = std::max<int64_t>(fitting / kernels.tile_blocks, 1) * kernels.tile_blocks;
  const int64_t panels_a_pass = std::max(kPassTokens / kernels.panel_tokens, 1);

  // A piece of a field: some blocks of rows, and as many panels as one pass has.
  const auto multiply_piece = [&](const Field& field, int64_t piece) {
    const int64_t block = field.first_block + piece % field.chunks * chunk;
    const int64_t blocks = std::min(chunk, field.last_block - block);
    const int64_t group = field.panels.begin + piece / field.chunks * panels_a_pass;
    const int64_t group_end = std::min(group + panels_a_pass, field.panels.end);
    for (int64_t unit = 0; unit < total; unit += pass) {
      const int64_t units = std::min(pass, total - unit);
      const uint8_t* weights = scratch;
      int64_t weight_stride = units * kernels.weight_bytes;
      if (in_place) {
        weights = w.block(block) + unit * kUnit * kBlockRows * 2;
        weight_stride = static_cast<int64_t>(layout.block_bytes);
      } else {
        for (int64_t b = 0; b < blocks; ++b)
          unpack(kernels, gemv, layout, w.block(block + b), unit, units, scratch + b * weight_stride);
      }
      GemmTile to{};
      to.bias = out.bias != nullptr && unit == 0 ? out.bias + block * kBlockRows : nullptr;
      to.stride = out.stride;
      to.scale = out.scale;
      to.add = out.add || unit > 0;
      to.rows = shape.rows - block * kBlockRows;
      const NextPass next(w, layout, kernels, unit + units < total ? Pass{block, unit + units} : Pass{block + chunk, 0},
                          field.last_block, pass, group_end - group);
      for (int64_t p = group; p < group_end; ++p) {
        to.next_panel = data + (p + 1 < group_end ? p + 1 : group) * panel_bytes(kernels, shape);
        const int first = panels.begin(static_cast<int>(p)), last = panels.begin(static_cast<int>(p) + 1);
        to.out = out.data + first * out.stride + block * kBlockRows;
        next.share(p - group, to);
        multiply(data + p * panel_bytes(kernels, shape), last - first, total, unit, units, weights, weight_stride,
                 blocks, to);
      }
    }
  };
  const int fields = grid.rows * grid.tokens;
  const bool shared = sharing.items != nullptr && divide_up(shape.blocks(), chunk) >= kSharedPieces * grid.rows;
  if (part >= fields && !shared) return;
  if (kernels.begin != nullptr) kernels.begin();
  for (int i = 0; i < (shared ? fields : 1); ++i) {
    const int at = (part + i) % fields;
    const Range tiles = part_of(row_tiles, at % grid.rows, grid.rows);
    Field field{tiles.begin * kernels.tile_blocks, std::min(tiles.end * kernels.tile_blocks, shape.blocks()), 0,
                part_of(panels.count, at / grid.rows, grid.tokens)};
    field.chunks = divide_up(field.last_block - field.first_block, chunk);
    const int64_t count = field.chunks * divide_up(field.panels.end - field.panels.begin, panels_a_pass);
    const auto next = [&](int64_t last) { return shared ? sharing.items->take(at, sharing.call, count) : last + 1; };
    for (int64_t piece = next(-1); piece >= 0 && piece < count; piece = next(piece)) multiply_piece(field, piece);
  }
  if (kernels.end != nullptr) kernels.end();
}

int gemm_from(const Shape& shape) {
  const GemmKernels& kernels = gemm_kernels(selected_isa(), shape);
  // Floats have a fraction of the rate of gemv's integers.
  const bool as_floats = kernels.operands == GemmKernels::Operands::floats && is_quantised(shape.format);
  if (as_floats) return kNeverGemm;
  return kernels.from_tokens != nullptr ? kernels.from_tokens(shape) : kGemvTokens + 1;
}

size_t gemm_bytes(const Shape& shape, int64_t tokens) {
  return gemm_bytes_on(gemm_kernels(selected_isa(), shape), shape, tokens);
}

void gemm_prepare(const Shape& shape, const float* x, int64_t stride, const int32_t* rows, int tokens, uint8_t* data,
                  int part, int parts) noexcept {
  gemm_prepare_on(gemm_kernels(selected_isa(), shape), shape, x, stride, rows, tokens, data, part, parts);
}

void gemm_multiply(const Matrix& w, const uint8_t* data, int tokens, const Output& out, int part, int parts,
                   const Sharing& sharing) noexcept {
  const Isa isa = selected_isa();
  gemm_multiply_on(gemm_kernels(isa, w.shape()), pick<GemvKernels>(isa), w, data, tokens, out, part, parts, sharing);
}

const GemmKernels& gemm_kernels(Isa isa, const Shape& shape) {
  const Format format = shape.format;
  // Halves have more bits than bfloat16: they are multiplied as floats.
  const bool fits_pairs = format != Format::f32 && format != Format::f16;
  if (fits_pairs)
    if (const auto* tiles = find_variant<TileGemmKernels>(isa)) return *tiles;
  if (is_quantised(format))
    if (const auto* kernels = find_variant<IntegerGemmKernels>(isa))
      if (const GemmKernels* found = kernels->find(shape)) return *found;
  if (fits_pairs)
    if (const auto* pairs = find_variant<PairGemmKernels>(isa)) return *pairs;
  return pick<GemmKernels>(isa);
}

}  // namespace anyaccel::llm
