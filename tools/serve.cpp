// sluice serve: a trained model behind OpenAI's completions API.
#include <spdlog/fmt/fmt.h>

#include <memory>

#include "commands.h"
#include "core/error.h"

#ifdef SLUICE_HAS_HTTPLIB
#include <httplib.h>
#include <netdb.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <iterator>
#include <mutex>
#include <thread>

#include "core/caught.h"
#include "core/cores.h"
#include "core/parallel_for.h"
#include "core/strict_json.h"
#include "eval/completions.h"
#include "hf/open.h"
#include "run/signals.h"
#endif

namespace sluice {
namespace {

struct ServeOptions {
  std::string path, device, tokenizer, host = "127.0.0.1";
  int64_t port = 8000, max_request_mb = 16, max_waiting = 64, max_new_tokens = 4096, batch = 8, context = 0;
};

#ifdef SLUICE_HAS_HTTPLIB

using nlohmann::json;
using nlohmann::ordered_json;

/// A request that waits for the thread that computes: a completion, or something else that is done by itself.
struct Job {
  json body;
  std::function<ordered_json(const json&)> other;  // empty: a completion
  std::promise<ordered_json> answer = {};
};

/// One thread computes; those that speak HTTP wait for it. Completions that wait are computed together.
class Worker {
 public:
  /// It takes over the number of threads of loops, which every thread has of its own.
  Worker(Completions& completions, int64_t most_waiting)
      : completions_(completions), most_waiting_(most_waiting), thread_([this, threads = num_threads()] {
          set_num_threads(threads);
          run();
        }) {}
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Nothing where too many wait already.
  std::optional<ordered_json> call(Job job) {
    auto result = job.answer.get_future();
    {
      const std::lock_guard lock(mutex_);
      if (std::ssize(jobs_) >= most_waiting_) return std::nullopt;
      jobs_.push_back(std::move(job));
    }
    changed_.notify_all();
    return result.get();
  }

 private:
  void run() {
    for (;;) {
      std::deque<Job> jobs;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return ended_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        jobs.swap(jobs_);
      }
      const auto completions = std::stable_partition(
          jobs.begin(), jobs.end(), [](const Job& job) { return static_cast<bool>(job.other); });
      for (auto job = jobs.begin(); job != completions; ++job) answer(*job);
      if (completions != jobs.end())
        complete(std::vector<Job>(std::make_move_iterator(completions), std::make_move_iterator(jobs.end())));
    }
  }

  static void answer(Job& job) {
    try {
      job.answer.set_value(job.other(job.body));
    } catch (...) {
      job.answer.set_exception(std::current_exception());
    }
  }

  void complete(std::vector<Job> jobs) {
    std::vector<json> bodies;
    for (Job& job : jobs) bodies.push_back(std::move(job.body));
    std::vector<CompletionAnswer> answers;
    try {
      answers = completions_.complete_all(bodies);
    } catch (...) {
      answers.assign(jobs.size(), {{}, std::current_exception()});
    }
    for (size_t i = 0; i < jobs.size(); ++i)
      if (answers[i].error)
        jobs[i].answer.set_exception(answers[i].error);
      else
        jobs[i].answer.set_value(std::move(answers[i].body));
  }

  Completions& completions_;
  const int64_t most_waiting_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool ended_ = false;
  std::thread thread_;
};

/// A run's name; a folder has none but its own.
std::string served_name(const Config& config, const std::string& path) {
  if (!config.name.empty()) return config.name;
  return std::filesystem::path(path).lexically_normal().filename().string();
}

void reply(httplib::Response& response, int status, const ordered_json& body) {
  response.status = status;
  response.set_content(body.dump(-1, ' ', false, json::error_handler_t::replace), "application/json");
}

void reply_error(httplib::Response& response, int status, const std::string& message) {
  reply(
      response, status,
      {{"error", {{"message", message}, {"type", status < 500 ? "invalid_request_error" : "server_error"}}}});
}

using Answer = std::function<ordered_json(const json&)>;

/// Errors of a request are the client's: 400 with a message. Everything else is ours: 500.
httplib::Server::Handler handler(Worker& worker, Answer answer) {
  return [&worker, answer = std::move(answer)](const httplib::Request& request, httplib::Response& response) {
    try {
      json body = request.method == "GET" ? json() : parse_strict_json(request.body, "the request");
      const auto result = worker.call({std::move(body), answer});
      if (!result) return reply_error(response, 503, "too many requests are waiting");
      reply(response, 200, *result);
    } catch (const std::exception&) {
      const Error error = caught_error();
      const bool clients = error.code() == ExitCode::usage || error.code() == ExitCode::data;
      reply_error(response, clients ? 400 : 500, error.what());
    }
  };
}

constexpr const char* kAddresses = "/v1/completions, /v1/models, /tokenize, /detokenize and /tokenizer_info";

void set_limits(httplib::Server& server, const ServeOptions& options) {
  server.set_payload_max_length(static_cast<size_t>(options.max_request_mb) << 20);
  server.set_read_timeout(30);
  server.set_write_timeout(30);
  server.set_tcp_nodelay(true);
  server.new_task_queue = [] { return new httplib::ThreadPool(16); };
  server.set_error_handler([](const httplib::Request&, httplib::Response& response) {
    if (!response.body.empty()) return;
    reply_error(response, response.status,
                response.status == 404   ? fmt::format("no such address; there are {}", kAddresses)
                : response.status == 413 ? "the request is too large"
                                         : fmt::format("HTTP status {}", response.status));
  });
}

void require_known_host(const std::string& host) {
  addrinfo* found = nullptr;
  if (const int problem = getaddrinfo(host.c_str(), nullptr, nullptr, &found))
    fail(ExitCode::usage, "--host {}: the host is unknown ({}); 127.0.0.1 is this machine", host,
         gai_strerror(problem));
  freeaddrinfo(found);
}

void serve(const ServeOptions& options) {
  ModelFiles files = open_model(options.path, {{}, options.device, options.tokenizer});
  const std::string what = files.path + files.step_text();
  const TrainedModel trained(std::move(files), 1);
  use_threads(trained.config().train.threads);
  CompletionLimits limits;
  limits.max_new_tokens = options.max_new_tokens;
  limits.context = options.context;
  Completions completions(trained, served_name(trained.config(), options.path), limits, options.batch);
  httplib::Server server;
  set_limits(server, options);
  Worker worker(completions, options.max_waiting);
  server.Post("/v1/completions", handler(worker, {}));
  server.Get("/v1/models", handler(worker, [&](const json&) { return completions.models(); }));
  server.Get("/tokenizer_info", handler(worker, [&](const json&) { return completions.tokenizer_info(); }));
  server.Post("/tokenize", handler(worker, [&](const json& body) { return completions.tokenize(body); }));
  server.Post("/detokenize", handler(worker, [&](const json& body) { return completions.detokenize(body); }));

  int port = static_cast<int>(options.port);
  if (port == 0) {
    port = server.bind_to_any_port(options.host);
  } else if (!server.bind_to_port(options.host, port)) {
    port = -1;
  }
  if (port < 0) {
    require_known_host(options.host);
    fail(ExitCode::cannot_create,
         "cannot listen on {}:{}; is the port taken, or {} not an address of this machine?", options.host,
         options.port, options.host);
  }
  fmt::print("{}: http://{}:{}/v1/completions\n", what, options.host, port);
  std::fflush(stdout);
  const StopSignals signals;
  std::atomic<bool> over = false;
  std::thread watch([&] {
    while (!signals.requested() && !over) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    server.stop();  // requests that have begun are answered
  });
  server.listen_after_bind();
  over = true;
  watch.join();
}

#else

void serve(const ServeOptions&) {
  fail(ExitCode::usage,
       "sluice serve is not in this build: cpp-httplib was missing (Debian: libcpp-httplib-dev)");
}

#endif

}  // namespace

void add_serve_command(Command& app, int&) {
  Command* command = app.add_subcommand("serve", "a trained model behind OpenAI's completions API");
  auto options = std::make_shared<ServeOptions>();
  command
      ->add_option("model", options->path,
                   "run folder (its newest valid checkpoint), checkpoint, or Hugging Face folder")
      ->required()
      ->type_name("RUN|CKPT|FOLDER");
  command->add_option("--port", options->port, "port; 0: any that is free (8000)")
      ->between(0, 65535)
      ->type_name("N");
  command
      ->add_option("--host", options->host,
                   "address to listen on (127.0.0.1: this machine alone; there is no authentication)")
      ->type_name("ADDRESS");
  command->add_option("--max-request-mb", options->max_request_mb, "largest request in MiB (16)")
      ->between(1, 1024)
      ->type_name("MIB");
  command
      ->add_option("--max-waiting", options->max_waiting, "requests that may wait; further ones get 503 (64)")
      ->between(1, 10000)
      ->type_name("N");
  command
      ->add_option("--batch", options->batch,
                   "sequences that are continued at once, each with memory for a whole context (8)")
      ->between(1, 1024)
      ->type_name("N");
  command
      ->add_option("--context", options->context,
                   "most tokens of a prompt with what follows it; 0: the model's positions (0)")
      ->between(0, 1e9)
      ->type_name("N");
  command
      ->add_option("--max-new-tokens", options->max_new_tokens,
                   "most tokens that a request may ask for (4096)")
      ->between(0, 1e6)
      ->type_name("N");
  command->add_option("--device", options->device, "auto, cpu or cuda; overrides the run's train.device")
      ->type_name("DEVICE");
  command->add_option("--tokenizer", options->tokenizer, "tokenizer, where the run holds none")
      ->type_name("byte|PATH");
  command->footer(
      "POST /v1/completions, /tokenize, /detokenize; GET /v1/models, /tokenizer_info. Completions that wait\n"
      "are computed together. Ends with SIGINT or SIGTERM, after the requests that have begun.\n\n"
      "Examples:\n"
      "  sluice serve runs/gated --port 8000\n"
      "  lm_eval --model local-completions --model_args "
      "model=gated,base_url=http://127.0.0.1:8000/v1/completions,tokenizer_backend=remote\n");
  command->callback([options] { serve(*options); });
}

}  // namespace sluice
