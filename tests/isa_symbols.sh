#!/bin/sh
# An inline function compiled for AVX-512 outside its namespace may be the copy the linker keeps,
# and then ends the process on an older CPU. So a unit compiled for an instruction set may only
# define symbols of that namespace. Usage: isa_symbols.sh BUILD_FOLDER
status=0
for isa in avx2 avx512 avx512_bf16 amx; do
  stray=$(find "$1/CMakeFiles/raddle_isa_$isa.dir" -name '*.o' -exec nm -AC --defined-only {} + 2>/dev/null |
    grep ' [A-TV-Zuvw] ' | grep -v "raddle::$isa::\|raddle::[a-z_:]*::$isa::")
  if [ -n "$stray" ]; then
    echo "outside of namespace raddle::$isa:"
    echo "$stray"
    status=1
  fi
done
exit $status
