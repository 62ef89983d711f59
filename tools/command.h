#pragma once
// Declaration of sub-commands and their options. It wraps CLI11, which only one file includes because it
// takes longer to compile than all of the commands together.
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace sluice {

class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}
  Option* required();
  Option* type_name(const std::string& name);  // name of the value in the help
  Option* group(const std::string& title);     // heading in the help
  Option* delimiter(char between);             // several values in one argument
  Option* allow_extra_args(bool allowed);      // several arguments after one name
  Option* not_negative();
  Option* between(double low, double high);
  Option* one_of(const std::vector<std::string>& words);
  bool given() const;  // on the command line, once it has been read

 private:
  CLI::Option* option_;
};

/// A command, by its words from the program's name on, and the words that may follow it.
struct CommandWords {
  std::string path;  // "sluice checkpoint"
  std::vector<std::string> commands, options;
};

class Command {
 public:
  explicit Command(CLI::App& app);
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  Command* add_subcommand(const std::string& name, const std::string& help);
  /// The target must outlive parsing. Names as in CLI11: "path" (positional), "--set", "-o,--output". T:
  /// std::string, bool, int, int64_t, uint64_t, double, or a std::vector of strings, int64_t or int. Whole
  /// numbers are written as in a configuration (1k, 1e6), and one that the type cannot hold is refused.
  template <class T>
  Option* add_option(const std::string& names, T& target, const std::string& help);
  Option* add_flag(const std::string& names, bool& target, const std::string& help);
  Command* footer(const std::string& text);       // text after the help, such as examples
  Command* callback(std::function<void()> work);  // called if the command was selected
  Command* require_subcommand(int count);
  /// Name of the program as it was invoked.
  std::string program() const;
  /// This command's and those of all below it.
  std::vector<CommandWords> words() const;

 private:
  CLI::App& app_;
  std::vector<std::unique_ptr<Command>> commands_;
  std::vector<std::unique_ptr<Option>> options_;
};

/// Version of CLI11.
std::string cli11_version();

}  // namespace sluice
