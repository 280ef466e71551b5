// The next tokens of a batch, drawn from logits: the last step of a language model's forward pass.
//
// For each row, in this order: penalties on tokens that the text has, temperature, top-k, top-p of
// what that leaves, min-p, one draw. Tokens stand in the order of their logits, equal ones by
// index, and each filter keeps the first of them. Weights are integers, so that no sum depends on
// its order: every device draws the same token from the same logits.
#pragma once

#include "raddle/tensor.h"

namespace raddle {

/// A number for all rows, fp32 [rows], or nothing: the default.
using RowNumber = ScaleRef;

/// An integer for all rows, an array [rows], or nothing: the default.
struct RowInteger {
  std::optional<std::int64_t> value;
  IndexRef array;

  RowInteger() = default;
  RowInteger(std::int64_t of_all) : value(of_all) {}       // NOLINT: an integer for all rows
  RowInteger(const IndexRef& of_each) : array(of_each) {}  // NOLINT: or an array of them
};

/// Tensors and arrays lie together, on the host or on a GPU.
struct SampleArgs {
  TensorRef logits;       ///< [rows, vocab] float32, float16 or bfloat16; vocab at most 2^22
  RowNumber temperature;  ///< at least 0; 0: the largest logit, the first of equal ones. Default 1
  RowInteger top_k;       ///< tokens to keep; 0 or less: all. Default 0
  RowNumber top_p;        ///< keeps the fewest tokens that have so much of the weight. Default 1
  RowNumber min_p;        ///< keeps tokens of at least so much of the largest weight. Default 0
  RowNumber repetition_penalty;  ///< divides positive logits of the text's tokens, multiplies
                                 ///< negative ones. Default 1
  RowNumber presence_penalty;    ///< is taken off the logits of generated tokens. Default 0
  RowNumber frequency_penalty;   ///< the same, times how often they were generated. Default 0
  IndexRef counts;  ///< [rows, vocab] int32: how often a token was generated, -1 where it stands in
                    ///< the prompt alone. Nothing: no penalties
  bool count_drawn = true;  ///< writes to `counts`: the drawn token's goes up by one
  RowInteger seed;          ///< of the row's random numbers. Default 0
  RowInteger offset;        ///< which of them is the row's. Default: its own number
  IndexRef tokens;          ///< [rows] int32 or int64, written
  void* stream = nullptr;   ///< of a GPU: a CUstream
};

/// Draws a token for each row. On the host everything is checked before anything is written. On a
/// GPU one kernel is launched, which a captured graph may keep: it reads what lies on the device
/// when it runs, and writes -1 for rows with a bad parameter, without a logit above -inf, or with
/// one that is NaN or infinite.
void sample(const SampleArgs& args);

}  // namespace raddle
