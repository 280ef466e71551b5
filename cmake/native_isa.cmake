# Sets `result` to the best instruction set of this machine. The library's own detection says which, so that what is
# built is what will be chosen.
function(raddle_native_isa result)
  if(CMAKE_CROSSCOMPILING)
    message(FATAL_ERROR "RADDLE_ISAS names native, and this build is for another machine; expected all, or a list")
  endif()
  if(NOT RADDLE_NATIVE_ISA)
    set(defines)
    if(RADDLE_EMULATED_TILES)
      set(defines -DRADDLE_EMULATED_TILES)
    endif()
    set(root ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
    try_run(
      status compiled
      SOURCES ${root}/cmake/native_isa.cpp ${root}/src/device/cpu/topology.cpp
      CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${root}/include;${root}/src"
      COMPILE_DEFINITIONS ${defines}
      CXX_STANDARD 20
      CXX_STANDARD_REQUIRED ON
      COMPILE_OUTPUT_VARIABLE log
      RUN_OUTPUT_STDOUT_VARIABLE name
    )
    if(NOT compiled OR NOT status EQUAL 0)
      message(FATAL_ERROR "cmake/native_isa.cpp, which finds this machine's instruction set, failed:\n${log}")
    endif()
    string(STRIP "${name}" name)
    set(RADDLE_NATIVE_ISA ${name} CACHE INTERNAL "What native is in RADDLE_ISAS")
  endif()
  message(STATUS "Instruction sets: generic and, the best of this machine, ${RADDLE_NATIVE_ISA}")
  set(${result} ${RADDLE_NATIVE_ISA} PARENT_SCOPE)
endfunction()
