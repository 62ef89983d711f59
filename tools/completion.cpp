// sluice completion: a script that completes commands and options in a shell, from the commands themselves.
#include <spdlog/fmt/fmt.h>

#include "commands.h"

namespace sluice {
namespace {

/// Words that begin with "-" are completed to options, others to commands, and to files where there are none.
std::string bash_script(const std::vector<CommandWords>& all) {
  std::string known, cases;
  for (const CommandWords& c : all) {
    known += fmt::format("{}\"{}\"", known.empty() ? "" : "|", c.path);
    cases += fmt::format("    \"{}\") commands=\"{}\" options=\"{}\" ;;\n", c.path,
                         fmt::join(c.commands, " "), fmt::join(c.options, " "));
  }
  return fmt::format(R"(_sluice() {{
  local word path=sluice commands= options=
  COMPREPLY=()
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$path $word" in {}) path="$path $word" ;; esac
  done
  case "$path" in
{}  esac
  word=${{COMP_WORDS[COMP_CWORD]}}
  case $word in -*) commands=$options ;; esac
  COMPREPLY=($(compgen -W "$commands" -- "$word"))
}}
complete -o default -F _sluice sluice
)",
                     known, cases);
}

}  // namespace

void add_completion_command(Command& app) {
  Command* command =
      app.add_subcommand("completion", "a script that completes commands and options in a shell");
  const auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash or zsh")->required()->one_of({"bash", "zsh"});
  command->footer(
      "Examples:\n  source <(sluice completion bash)\n"
      "  sluice completion zsh >~/.zfunc/_sluice    with ~/.zfunc in fpath, before compinit\n");
  command->callback([shell, &app] {
    if (*shell == "zsh") fmt::print("#compdef sluice\nautoload -U +X bashcompinit && bashcompinit\n");
    fmt::print("{}", bash_script(app.words()));
  });
}

}  // namespace sluice
