// Whether this process may use AMX.
#pragma once

namespace raddle::cpu {

/// Whether the CPU has AMX for bf16, and Linux has let this process use it: tiles are 8 KiB of
/// state a thread, which a process has to ask for. Asked once; all threads that start later may,
/// too.
bool amx_allowed();

}  // namespace raddle::cpu
