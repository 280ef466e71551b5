#include "layout/on_device.h"

#include <utility>

#include "device/name.h"
#include "layout/normal_form.h"
#include "raddle/error.h"

namespace raddle {
namespace {

constexpr i64 i32_max = 0x7fffffff;

void check_array(const char* name, const IndexRef& ref, DeviceId device, int rank) {
  if (ref.empty())
    fail<TypeError>(name, " is missing; expected an int32 array on '", name_of(device), "'");
  if (ref.device != device)
    fail<ValueError>(name, " lies on '", name_of(ref.device), "'; expected '", name_of(device),
                     "', where kv_len lies: nothing is copied");
  if (ref.is_64bit)
    fail<TypeError>(name, " has dtype int64; expected int32 on a GPU: nothing is converted there");
  if (ref.rank != rank) fail<ValueError>(name, " has ", ref.rank, " dimensions; expected ", rank);
  const auto last = static_cast<std::size_t>(rank - 1);
  if (ref.shape[last] > 1 && ref.stride[last] != 1)
    fail<ValueError>(name, " has stride ", ref.stride[last],
                     "; expected 1 on a GPU: make it contiguous");
}

void check_entries(const char* name, i64 found, i64 expected, const char* why) {
  if (found != expected)
    fail<ValueError>(name, " has ", found, " entries; expected ", expected, ", ", why);
}

const i32* ints(const IndexRef& ref) { return static_cast<const i32*>(ref.data); }

/// Page lists, or the rows of a block table.
void take_pages(const DevicePagedArgs& args, DeviceId device, DeviceBatch& batch) {
  const IndexRef& pages = args.page_indices;
  const i64 requests = batch.num_requests;
  if (args.page_indptr.empty()) {
    check_array("page_indices", pages, device, 2);
    check_entries("page_indices: its first dimension", pages.shape[0], requests, "one a request");
    if (pages.stride[0] < 0)
      fail<ValueError>("page_indices has rows ", pages.stride[0],
                       " entries apart; expected 0 or more");
    batch.row_stride = pages.stride[0];
    batch.num_entries = pages.shape[1];
    if (requests * batch.row_stride + batch.num_entries > i32_max)
      fail<ValueError>("page_indices has ", requests, " rows ", batch.row_stride,
                       " entries apart; expected less than 2^31 entries");
  } else {
    check_array("page_indices", pages, device, 1);
    check_array("page_indptr", args.page_indptr, device, 1);
    check_entries("page_indptr", args.page_indptr.shape[0], requests + 1, "as qo_indptr has");
    if (pages.shape[0] > i32_max)
      fail<ValueError>("page_indices has ", pages.shape[0], " entries; expected at most ", i32_max);
    batch.page_indptr = ints(args.page_indptr);
    batch.num_entries = pages.shape[0];
  }
  batch.pages = ints(pages);
}

void check_absent(const DevicePagedArgs& args) {
  for (const auto& [name, ref] :
       {std::pair{"kv_begin", args.kv_begin}, {"qo_rows", args.qo_rows}, {"qo_pos", args.qo_pos}})
    if (!ref.empty()) fail<ValueError>(name, " is given; expected None where lengths lie on a GPU");
}

}  // namespace

DeviceLayoutPtr device_paged_kv(const DevicePagedArgs& args) {
  const DeviceId device = args.kv_len.device;
  if (args.kv_len.empty()) fail<TypeError>("kv_len is missing; expected an int32 array on a GPU");
  if (device.kind != DeviceId::Kind::cuda)
    fail<ValueError>("kv_len lies on '", name_of(device), "'; expected a GPU, as other arrays do");
  check_absent(args);
  if (args.page_size < 1)
    fail<ValueError>("page_size is ", args.page_size, "; expected at least 1");
  check_num_rows(args.num_rows);
  if (args.num_pages < 0)
    fail<ValueError>("num_pages is ", args.num_pages, "; expected at least 0");
  if (args.min_prefix < 0)
    fail<ValueError>("discover_prefixes is ", args.min_prefix,
                     "; expected the least number of tokens that makes a level, or 0");
  check_array("kv_len", args.kv_len, device, 1);
  auto layout = std::make_shared<DeviceLayout>();
  layout->device = device;
  layout->order = args.order;
  layout->num_rows = args.num_rows;
  layout->owner = args.owner;
  DeviceBatch& batch = layout->batch;
  batch = {};
  if (args.kv_len.shape[0] >= i32_max)
    fail<ValueError>("kv_len has ", args.kv_len.shape[0], " entries; expected less than 2^31");
  batch.num_requests = static_cast<i32>(args.kv_len.shape[0]);
  check_array("qo_indptr", args.qo_indptr, device, 1);
  check_entries("qo_indptr", args.qo_indptr.shape[0], i64{batch.num_requests} + 1,
                "one more than kv_len has");
  if (!args.num_requests.empty()) {
    check_array("num_requests", args.num_requests, device, 1);
    check_entries("num_requests", args.num_requests.shape[0], 1, "the number of requests");
    batch.num_requests_at = ints(args.num_requests);
  }
  batch.qo_indptr = ints(args.qo_indptr);
  batch.kv_len = ints(args.kv_len);
  batch.page_size = args.page_size;
  batch.num_pages = args.num_pages;
  batch.min_prefix = args.min_prefix;
  take_pages(args, device, batch);
  return layout;
}

LayoutPtr stand_in(const DeviceLayout& layout, i32 max_qo_tokens) {
  const DeviceBatch& batch = layout.batch;
  const auto requests = static_cast<std::size_t>(batch.num_requests);
  std::vector<i32> qo_indptr(requests + 1, 0);
  qo_indptr.back() = layout.num_rows < 0 ? max_qo_tokens : layout.num_rows;
  std::vector<Level> levels(static_cast<std::size_t>(layout.num_levels()));
  for (Level& level : levels) {
    level.storage = KvStorage::paged;
    level.order = layout.order;
    level.block_size = batch.page_size;
    level.row_indptr = {0};
    level.max_block = batch.num_pages - 1;
  }
  levels.front().keys_are_shared = levels.size() > 1;
  levels.back().row_indptr = qo_indptr;
  levels.back().columns.assign(requests, 0);
  levels.back().block_begin.assign(requests, 0);
  return std::make_shared<const Layout>(std::move(qo_indptr), std::vector<i32>(requests, 0),
                                        std::vector<i32>{}, std::vector<i32>{}, std::move(levels));
}

}  // namespace raddle
