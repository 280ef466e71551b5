// The KV cache: appending keys and values, copying pages, choosing pages by their summaries,
// accepting drafts.
//
// A page table (paged_kv) says where keys lie. Pools are [pages, page_size, Hkv, D] (NHD) or
// [pages, Hkv, page_size, D] (HND), as the layout says. Everything is checked before anything is
// written; errors name the argument, what was found and what was expected.
//
// Tensors lie together, on the host or on a GPU; index arrays and layouts are the host's. On a GPU
// a call launches on `stream` (a CUstream; null: the default one) and waits for nothing.
#pragma once

#include "raddle/attention.h"

namespace raddle {

/// Appends rows of new K and V [rows, Hkv, D]: row r of request i becomes key kv_len - qo_len + r
/// of its pages. `rope`, a variant that changes keys and nothing else, is applied on the way at the
/// row's position (the layout's qo_pos, by default the key's index): in fp32, rounded once.
/// Refused: two rows for one slot.
///
/// Into a pool of 8-bit elements rows of 16 or 32 bits are quantised: divided by pool.k_scale and
/// pool.v_scale in fp32 and rounded once, and what is too large becomes the largest finite number.
/// Scales of tokens are written: each row and head gets max |x| / (the largest finite number), at
/// least 2^-126. Head dims are multiples of 8 then, at most 256.
void append_kv(const Layout& layout, const TensorRef& k_new, const TensorRef& v_new,
               const KvRef& pool, const Variant* rope = nullptr, void* stream = nullptr);

/// The same, row r to slots[r] = page * page_size + slot of its page; below 0: it goes nowhere.
/// Rows behind the slots are padding. Slots lie where the tensors do: int32 or int64. On a GPU they
/// are read when the kernel runs, also in a captured graph, and slots outside of the pool are none;
/// on the host they are refused. Of two rows for one slot either may stay.
void append_kv(const IndexRef& slots, HeadOrder order, const TensorRef& k_new,
               const TensorRef& v_new, const KvRef& pool, void* stream = nullptr);

/// Copies K and V of page from_pages[i] of `from` to page to_pages[i] of `to`, for all i at once:
/// no page is written twice, or both read and written. Tensors are [pages, …] of rank 2 to 4 and
/// alike but for their number of pages. `to` may be `from`. Scales of tokens go along; others are
/// refused, for they belong to whole pools.
void copy_pages(const KvRef& from, const KvRef& to, const IndexRef& from_pages,
                const IndexRef& to_pages, void* stream = nullptr);

/// Writes the elementwise minimum and maximum of each page's keys to `summary` [pages, 2, Hkv, D],
/// in K's dtype (Quest, arXiv 2406.10774); of quantised K those of its values, rounded once to the
/// summary's dtype, which has 16 or 32 bits. `new_only`: only of pages that hold rows of the batch.
/// Pages that the layout does not list are left alone. Requests that share a page must agree on its
/// number of keys.
void summarize_pages(const Layout& layout, const TensorRef& k_pool, const TensorRef& summary,
                     bool new_only = false, void* stream = nullptr, const ScaleRef& k_scale = {});

/// What select_pages is asked. A list is a request's, or with `per_head` a request's and KV head's.
struct SelectArgs {
  TensorRef q;           ///< [rows, Hq, D]
  TensorRef summary;     ///< [pages, 2, Hkv, D] as summarize_pages writes it
  i32 num_selected = 1;  ///< entries of a list
  bool per_head = false;
  bool keep_last = true;  ///< a request's last page is selected whatever its score
  i32* pages = nullptr;   ///< out: [requests(, Hkv), num_selected], in the request's order, then -1
  i32* pos = nullptr;     ///< out: position of the page's first key; 0 where there is no page
  i32* count =
      nullptr;  ///< out: keys of the page; 0 where there is none. All three lie where q does
  void* stream = nullptr;
};

/// The pages of each request with the largest scores: Σ_d max(q_d·min_d, q_d·max_d), the largest
/// over its rows and query heads. Of equal scores earlier pages win.
void select_pages(const Layout& layout, const SelectArgs& args);

/// A block-sparse layout of the selected pages, given as lists of a request: every row sees its
/// request's pages. Query rows keep their positions, keys theirs, and keys count in their order.
LayoutPtr selected_layout(const Layout& layout, const IndexRef& pages, const IndexRef& pos,
                          const IndexRef& count);

/// Of a token tree a request, whose nodes are the batch's rows, already appended: moves the rows of
/// K and V on the path to the last accepted node to the front, so that they are the request's next
/// keys; scales of tokens move along, others are refused. Writes the keys that each request has
/// then to `kv_len` [requests]; null: not wanted.
///   parents [rows]: each node's parent, an earlier node of its request, or -1
///   accepted [requests]: the last accepted node; -1: none
void accept_tree(const Layout& layout, const KvRef& pool, const IndexRef& parents,
                 const IndexRef& accepted, i32* kv_len = nullptr, void* stream = nullptr);

}  // namespace raddle
