#include "run/console.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace sluice {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

/// Output may be impossible (a closed pipe, a full disk), which must not end training.
void put(FILE* stream, const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stream);
  std::fflush(stream);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string format_count(double n) {
  if (n < 1e3) return fmt::format("{:.0f}", n);
  const char* unit = "k";
  for (const char* next : {"M", "B", "T"}) {
    if (n < 999.5e3) break;
    n /= 1e3;
    unit = next;
  }
  n /= 1e3;
  return n < 10    ? fmt::format("{:.2f}{}", n, unit)
         : n < 100 ? fmt::format("{:.1f}{}", n, unit)
                   : fmt::format("{:.0f}{}", n, unit);
}

std::string format_duration(double s) {
  const auto seconds = static_cast<int64_t>(std::llround(std::max(s, 0.0)));
  if (seconds < 60) return fmt::format("{}s", seconds);
  if (seconds < 3600) return fmt::format("{}m{:02}s", seconds / 60, seconds % 60);
  if (seconds < 86400) return fmt::format("{}h{:02}m", seconds / 3600, seconds % 3600 / 60);
  return fmt::format("{}d{:02}h", seconds / 86400, seconds % 86400 / 3600);
}

std::string format_exponent(double lr) {
  if (lr == 0) return "0";
  const std::string text = fmt::format("{:.1e}", lr);  // 6.0e-04
  const size_t e = text.find('e');
  const int exponent = std::atoi(text.c_str() + e + 1);
  return fmt::format("{}e{}", text.substr(0, e), exponent);
}

std::string format_mib(int64_t bytes) {
  return fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 20));
}

Terminal Terminal::detect(ConsoleMode mode) {
  Terminal t;
  const bool terminal = isatty(STDOUT_FILENO) && isatty(STDERR_FILENO) && variable("TERM") != "dumb";
  bool launched = false;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "PMI_RANK"})
    launched |= !variable(name).empty();
  t.bar = mode == ConsoleMode::bar || (mode == ConsoleMode::automatic && terminal && !launched);
  t.colour = t.bar && terminal && variable("NO_COLOR").empty();
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"})
    if (const std::string locale = variable(name); !locale.empty()) {
      t.unicode = locale.find("UTF-8") != std::string::npos || locale.find("utf8") != std::string::npos;
      break;
    }
  winsize window{};
  if (const int columns = std::atoi(variable("COLUMNS").c_str()); columns > 0) {
    t.width = columns;
  } else if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0) {
    t.width = window.ws_col;
  } else if (!terminal) {
    t.width = 120;
  }
  return t;
}

std::string format_progress(const Progress& p, const Terminal& terminal) {
  const double done = p.max_steps > 0 ? static_cast<double>(p.step) / static_cast<double>(p.max_steps) : 0;
  const auto digits = static_cast<int>(std::to_string(p.max_steps).size());
  const std::string head =
      fmt::format("step {:>{}}/{}  {:>4.1f}%", p.step, digits + 1, p.max_steps, 100 * done);
  std::string tail = fmt::format("  loss {:.3f}  gn {:.2f}  lr {}  {} tok/s", p.loss, p.grad_norm,
                                 format_exponent(p.lr), format_count(p.tokens_per_second));
  for (const Progress::Labelled& loss : p.losses)
    tail += fmt::format("  {} {:.{}f}", loss.label, loss.value, loss.digits);
  if (p.skipped > 0) tail += fmt::format("  skipped {}", p.skipped);
  if (p.seconds_left >= 0 && p.step < p.max_steps)
    tail += fmt::format("  ETA {}{}", p.rough ? "~" : "", format_duration(p.seconds_left));
  if (!terminal.bar) return head + tail;

  // What is left of the line, less one column so that terminals do not wrap.
  const int room = terminal.width - 1 - static_cast<int>(head.size() + tail.size()) - 2;
  const int cells = std::min(room, 24);
  std::string bar;
  if (cells >= 4) {
    const int full = std::clamp(static_cast<int>(done * cells), 0, cells);
    bar = "  ";
    if (terminal.colour) bar += "\x1b[32m";
    for (int i = 0; i < cells; ++i)
      bar += i < full ? (terminal.unicode ? "\u2588" : "#") : (terminal.unicode ? "\u2591" : "-");
    if (terminal.colour) bar += "\x1b[0m";
    return head + bar + tail;
  }
  return (head + tail).substr(0, static_cast<size_t>(std::max(terminal.width - 1, 20)));
}

Console::~Console() {
  const std::scoped_lock lock(mutex_);
  clear_bar();
}

void Console::log_to(const std::string& path) {
  const std::scoped_lock lock(mutex_);
  file_ = std::make_unique<io::OutputFile>(path, io::OutputFile::Mode::append);
}

void Console::line(const std::string& text) {
  const std::scoped_lock lock(mutex_);
  log(text);
  if (mode_ != ConsoleMode::none) write(text, false);
}

void Console::warning(const std::string& text) {
  const std::scoped_lock lock(mutex_);
  log(text);
  write(text, true);
}

void Console::progress(const Progress& p) {
  const std::scoped_lock lock(mutex_);
  Terminal plain = terminal_;
  plain.bar = false;
  const std::string text = format_progress(p, plain);
  log(text);
  if (mode_ == ConsoleMode::none) return;
  if (terminal_.bar)
    draw(p);
  else
    write(text, false);
}

void Console::tick(const Progress& p) {
  if (!terminal_.bar || mode_ == ConsoleMode::none || now() - drawn_at_ < 0.2) return;
  const std::scoped_lock lock(mutex_);
  draw(p);
}

void Console::draw(const Progress& p) {
  put(stdout, "\r" + format_progress(p, terminal_) + "\x1b[K");
  bar_shown_ = true;
  drawn_at_ = now();
}

void Console::write(const std::string& text, bool error) {
  clear_bar();
  put(error ? stderr : stdout, text + "\n");
}

void Console::clear_bar() {
  if (bar_shown_) put(stdout, "\r\x1b[K");
  bar_shown_ = false;
}

void Console::log(const std::string& text) {
  if (!file_) return;
  try {
    file_->write(text + "\n");
  } catch (const io::IoError& error) {
    file_.reset();
    write(fmt::format("warning: {}; it ends here", error.what()), true);
  }
}

struct ConsoleWarnings::Impl {
  class Sink : public spdlog::sinks::base_sink<std::mutex> {
   public:
    explicit Sink(Console& console) : console_(console) {}

   protected:
    void sink_it_(const spdlog::details::log_msg& message) override {
      const auto level = spdlog::level::to_string_view(message.level);
      console_.warning(fmt::format("{}: {}", std::string_view(level.data(), level.size()),
                                   std::string_view(message.payload.data(), message.payload.size())));
    }
    void flush_() override {}

   private:
    Console& console_;
  };
  decltype(spdlog::default_logger()) before = spdlog::default_logger();
};

ConsoleWarnings::ConsoleWarnings(Console& console) : impl_(std::make_unique<Impl>()) {
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("run", std::make_shared<ConsoleWarnings::Impl::Sink>(console)));
}
ConsoleWarnings::~ConsoleWarnings() { spdlog::set_default_logger(impl_->before); }

}  // namespace sluice
