# Sets `result` to what version.py says; without a Python, to the version that its sources are on the way to.
function(raddle_version result)
  set(script ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/version.py)
  find_program(RADDLE_VERSION_PYTHON NAMES python3 python)
  mark_as_advanced(RADDLE_VERSION_PYTHON)
  if(RADDLE_VERSION_PYTHON)
    execute_process(
      COMMAND ${RADDLE_VERSION_PYTHON} ${script}
      OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY
    )
  else()
    file(STRINGS ${script} line REGEX "^NEXT = ")
    string(REGEX MATCH "[0-9.]+" version "${line}")
  endif()
  set(${result} ${version} PARENT_SCOPE)
endfunction()
