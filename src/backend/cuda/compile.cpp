#include "backend/cuda/compile.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <optional>

#include "backend/kv_tensors.h"
#include "plan/heuristics.h"
#include "raddle/engine/kernel/wgmma/config.h"
#include "raddle/error.h"
#include "variant/bound_variant.h"

namespace raddle::cuda {
namespace {

/// All kernels that a choice may name (KernelChoice).
std::vector<KernelForm> forms_of(const AttentionSpec& spec, const FamilyFacts& facts) {
  std::vector<KernelForm> forms;
  if (facts.asked != KernelFamily::wgmma)
    forms = {{KernelForm::short_only}, {KernelForm::any_length}};
  if (unserved_by_wgmma(spec, facts) || facts.asked == KernelFamily::mma) return forms;
  for (const bool rows : {false, true}) {
    if (long_queries_on_wgmma(spec, facts))
      for (const bool clusters : {false, true})
        if (!clusters || takes_clusters(spec))
          forms.push_back({KernelForm::wgmma, {false, rows, clusters}});
    for (const bool levels : {false, true})
      for (i32 which = KernelForm::wgmma_short_8; which < KernelForm::count; ++which) {
        const KernelForm form{static_cast<KernelForm::Which>(which), {levels, rows}};
        if (form.short_rows() <= wgmma::most_short_rows(spec.head_dim_vo)) forms.push_back(form);
      }
  }
  return forms;
}

/// Compiles a kernel, without looking into the cache.
template <class Source>
KernelReport report_of(const Source& kernel, const std::string& arch, i32 shared_bytes) {
  const auto start = std::chrono::steady_clock::now();
  jit::Cubin cubin = jit::compile(kernel, arch);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const jit::Resources used = jit::parse_resources(cubin.log);
  return {used.registers, used.spill_bytes,     shared_bytes,
          took.count(),   std::move(cubin.log), std::move(cubin.bytes)};
}

}  // namespace

KernelForm form_of(KernelFamily family, bool short_only, i32 short_rows) {
  if (family == KernelFamily::mma)
    return {short_only ? KernelForm::short_only : KernelForm::any_length};
  if (short_rows == 0) return {KernelForm::wgmma};
  const i32 nth = std::countr_zero(static_cast<u32>(short_rows / 8));
  return {static_cast<KernelForm::Which>(KernelForm::wgmma_short_8 + nth)};
}

jit::GpuKernel kernel_of(const AttentionSpec& spec, const BoundVariant& variant,
                         const std::string& arch, const KernelForm& form) {
  if (spec.dtype == DType::float32)
    fail<ValueError>("dtype is 'float32'; GPU kernels compute 'float16' and 'bfloat16'");
  if (spec.dtype == DType::bfloat16 && jit::arch_number(arch) < 80)
    fail<ValueError>("dtype is 'bfloat16'; expected 'float16' on sm_", jit::arch_number(arch),
                     ", whose matrix instructions take no other");
  if (has_8_bits(spec.stored_dtype()) && spec.k_extends_v) {
    // The two parts of a key have scales of their own, and a step of the product sees one part.
    if (spec.head_dim_vo % 64 != 0)
      fail<ValueError>("head_dim_vo is ", spec.head_dim_vo,
                       "; expected a multiple of 64 on a GPU, with k_extends_v=True and kv_dtype '",
                       name_of(spec.stored_dtype()), "'");
    if (variant.stages().num_key > 0)
      fail<ValueError>(
          "variant changes keys; expected none that does on a GPU, with "
          "k_extends_v=True and kv_dtype '",
          name_of(spec.stored_dtype()), "': turn them when they are appended");
  }
  jit::GpuKernel kernel{
      form.family(),    spec.dtype,       spec.stored_dtype(), spec.head_dim_qk,
      spec.head_dim_vo, spec.k_extends_v, variant.source(),    variant.memory_bytes()};
  kernel.short_only = form.which == KernelForm::short_only;
  kernel.short_rows = form.short_rows();
  kernel.serves = form.serves;
  kernel.scales_output = form.scales;
  return kernel;
}

std::vector<KernelForm> first_kernels(const AttentionSpec& spec, const FamilyFacts& facts) {
  std::vector<KernelForm> forms = {
      {decodes_on_wgmma(spec, facts) ? KernelForm::wgmma_short_8 : KernelForm::short_only}};
  if (long_queries_on_wgmma(spec, facts))
    forms.push_back({KernelForm::wgmma});
  else if (facts.asked != KernelFamily::wgmma)
    forms.push_back({KernelForm::any_length});
  return forms;
}

FamilyFacts facts_of(const BoundVariant& variant, const std::string& arch, bool takes_tensor_maps,
                     std::optional<KernelFamily> asked) {
  const Stages& stages = variant.stages();
  const bool virtual_arch = arch.rfind("compute_", 0) == 0;
  return {virtual_arch ? 0 : jit::arch_number(arch), takes_tensor_maps,
          stages.num_query + stages.num_key + stages.num_value > 0, variant.has_masks(), asked};
}

KernelConfig config_of(const AttentionSpec& spec, const std::string& arch, KernelFamily family,
                       i32 short_rows, bool outputs) {
  const KernelConfig config =
      gpu_kernel_config(spec, jit::arch_number(arch), family, short_rows, outputs);
  if (config.blocks_per_multiprocessor == 0)
    fail<ValueError>("head_dim is ", spec.head_dim_qk, " and head_dim_vo ", spec.head_dim_vo,
                     "; expected tiles that fit the shared memory of sm_", jit::arch_number(arch));
  return config;
}

jit::PlannerKernel planner_of(const AttentionSpec& spec, const BoundVariant& variant, bool prefixes,
                              bool in_shared) {
  return {.composition = variant.source(),
          .variant_bytes = variant.memory_bytes(),
          .prefixes = prefixes,
          .in_shared = in_shared,
          .fixed_chunks = spec.batch_invariant};
}

KernelReport compile(const AttentionSpec& spec, const std::string& arch, KernelFamily family,
                     bool short_only, i32 short_rows, wgmma::Serves serves, bool scales_output) {
  check_spec(spec);
  const BoundVariant variant(spec, arch);
  if (family == KernelFamily::wgmma) {
    const char* why = unserved_by_wgmma(spec, facts_of(variant, arch, true, {}));
    if (!why && short_rows == 0) why = long_queries_unserved_by_wgmma(spec);
    if (why) fail<ValueError>("family is 'wgmma', and ", why);
  }
  if (short_rows != 0 && (family != KernelFamily::wgmma ||
                          wgmma::short_rows_for(short_rows, spec.head_dim_vo) != short_rows))
    fail<ValueError>("short_rows is ", short_rows, "; expected 0, or of the wgmma family 8, 16, ",
                     "32, or 64 where head_dim_vo is at most 128");
  if (serves.levels && short_rows == 0)
    fail<ValueError>("levels is given, and short_rows is 0: other kernels run plans of any levels");
  if (serves.rows && family != KernelFamily::wgmma)
    fail<ValueError>("rows is given, and family is 'mma', whose kernels read any keys");
  if (serves.clusters && (family != KernelFamily::wgmma || short_rows != 0))
    fail<ValueError>("clusters is given; expected the wgmma family and short_rows 0");
  KernelForm form = form_of(family, short_only, short_rows);
  form.serves = serves;
  form.scales = scales_output;
  const jit::GpuKernel kernel = kernel_of(spec, variant, arch, form);
  if (scales_output && kernel.kv_dtype != kernel.dtype)
    fail<ValueError>("scales_output is given, and kv_dtype is '", name_of(kernel.kv_dtype),
                     "'; expected K and V of 16 bits: all kernels of 8 bits scale V");
  const KernelConfig config = config_of(spec, arch, family, short_rows, variant.has_output());
  return report_of(kernel, arch, config.shared_bytes);
}

KernelReport compile_planner(const AttentionSpec& spec, const std::string& arch, bool prefixes,
                             bool in_shared) {
  check_spec(spec);
  return report_of(planner_of(spec, BoundVariant(spec, arch), prefixes, in_shared), arch, 0);
}

std::vector<KernelText> kernels_of(const AttentionSpec& spec, const std::string& arch, bool all) {
  check_spec(spec);
  const BoundVariant variant(spec, arch);
  const FamilyFacts facts =
      facts_of(variant, arch, true, family_named(std::getenv("RADDLE_BACKEND")));
  check_asked_family(spec, facts);
  std::vector<KernelText> found;
  const auto add = [&](KernelForm form) {
    const jit::GpuKernel kernel = kernel_of(spec, variant, arch, form);
    found.push_back({jit::label_of(kernel), jit::source_of(kernel, arch)});
  };
  std::vector<KernelForm> first = first_kernels(spec, facts);
  // What a first prompt's plan has compiled (CudaPlans::put).
  if (long_queries_on_wgmma(spec, facts) && takes_clusters(spec))
    first.push_back({KernelForm::wgmma, {.clusters = true}});
  for (const KernelForm& form : first) add(form);
  if (!all) return found;
  for (const KernelForm& form : forms_of(spec, facts))
    if (std::find(first.begin(), first.end(), form) == first.end()) add(form);
  for (const bool prefixes : {false, true})
    for (const bool in_shared : {true, false}) {
      const jit::PlannerKernel planner = planner_of(spec, variant, prefixes, in_shared);
      found.push_back({jit::label_of(planner), jit::source_of(planner)});
    }
  return found;
}

}  // namespace raddle::cuda
