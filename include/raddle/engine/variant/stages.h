// A composition of variants as the stages that a kernel without its own compiled variant runs: the
// contract's parts as functions over fp32 rows, in the order written. Plain data; each CPU ISA
// fills the functions in (kernel/cpu/stages.h).
#pragma once

#include "raddle/engine/variant/contract.h"

namespace raddle {

/// Keys of one tile, as a stage's loop over keys reads them.
struct KeyLanes {
  const i32* kv_index;
  const i32* kv_pos;
  i32 request;
  i32 kv_head;
};

/// Logits of a tile, as a stage reads and changes them.
struct LogitRows {
  float* s;  ///< [num_rows, n], rows `stride` floats apart
  i32 stride;
  i32 n;
  const Row* rows;
  i32 num_rows;
  float scale;  ///< multiplies every logit before the variant sees it
};

/// A variant's parts as stages over fp32 rows. Absent parts are null. `self` is the variant's
/// struct.
struct VariantOps {
  const char* name;
  const char* type;  ///< the struct's name in C++
  const Member* members;
  i32 num_members;
  i32 bytes;  ///< size of the variant's struct
  Scan scan;
  void (*query)(const void* self, float* q, i32 dim, const Row& row);
  void (*key)(const void* self, float* k, i32 dim, const Key& key);
  void (*value)(const void* self, float* v, i32 dim, const Key& key);
  void (*logits)(const void* self, const LogitRows& logits, const KeyLanes& keys);
  void (*mask)(const void* self, u8* keep, i32 n, const Row& row, const KeyLanes& keys);
  KvSpan (*kv_span)(const void* self, const Tile& tile);
  Coverage (*coverage)(const void* self, const Tile& tile);
  float (*sink)(const void* self, const Row& row);
  void (*output)(const void* self, float* o, i32 dim, const Row& row, float lse);
};

struct BoundStage {
  const VariantOps* ops;
  const void* self;
};

/// One step of a mask expression in postfix order.
struct MaskStep {
  enum class Kind : i32 { leaf, all_of, any_of };
  Kind kind;
  BoundStage stage;  ///< of a leaf
};

constexpr i32 max_stages = 16;
constexpr i32 max_mask_depth = 4;  ///< operands on the stack of a mask expression

/// A composition: for each part of the contract, the stages of the variants that have it, in the
/// order in which the variants are listed.
struct Stages {
  i32 num_query, num_key, num_value, num_logits, num_mask, num_output;
  BoundStage query[max_stages];
  BoundStage key[max_stages];
  BoundStage value[max_stages];
  BoundStage logits[max_stages];
  BoundStage output[max_stages];
  MaskStep mask[2 * max_stages];
  BoundStage sink;  ///< at most one; ops is null where there is none
  Scan scan;
};

}  // namespace raddle
