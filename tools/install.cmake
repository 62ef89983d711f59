# cmake --install BUILD --prefix P: the program, the shipped configurations and the scripts that need no source tree.
include(GNUInstallDirs)
set(share ${CMAKE_INSTALL_DATADIR}/sluice)
# Libraries outside the system's folders (NCCL of a package) are found where the build has found them.
set_target_properties(sluice PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS sluice RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY configs/ DESTINATION ${share}/configs USE_SOURCE_PERMISSIONS)
# Without those that build, test or measure the sources.
install(DIRECTORY scripts/ DESTINATION ${share}/scripts USE_SOURCE_PERMISSIONS
        REGEX "/(__pycache__|setup|prefix|build|test|style|tidy|quickstart|faults|fuzz|gpu_check|bench_pytorch[^/]*|check_tokenizers|tokenizers|(make_)?goldens[^/]*|mypy\\.ini|ruff\\.toml)$" EXCLUDE
        PATTERN "*.pyc" EXCLUDE)
install(FILES README.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# The program writes its own completion scripts.
set(completion ${PROJECT_BINARY_DIR}/completion)
install(CODE "
  file(MAKE_DIRECTORY \"${completion}\")
  foreach(shell bash zsh)
    execute_process(COMMAND \"$<TARGET_FILE:sluice>\" completion \${shell}
                    OUTPUT_FILE \"${completion}/\${shell}\" COMMAND_ERROR_IS_FATAL ANY)
  endforeach()")
install(FILES ${completion}/bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME sluice)
install(FILES ${completion}/zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions RENAME _sluice)
