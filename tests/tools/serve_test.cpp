// sluice serve over a socket: a completion, errors with their status, and a graceful end.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <future>

#include "tools/tiny_run.h"

namespace sluice {
namespace {

using namespace test;

/// Sends one request and returns the whole answer.
std::string exchanged(int port, const std::string& request) {
  const int socket_ = socket(AF_INET, SOCK_STREAM, 0);
  REQUIRE(socket_ >= 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(send(socket_, request.data(), request.size(), MSG_NOSIGNAL) == std::ssize(request));
  std::string answer;
  char part[4096];
  for (ssize_t n; (n = recv(socket_, part, sizeof part, 0)) > 0;) answer.append(part, static_cast<size_t>(n));
  close(socket_);
  return answer;
}

std::string post(int port, const std::string& path, const std::string& body) {
  return exchanged(port, fmt::format("POST {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: "
                                     "application/json\r\nContent-Length: {}\r\n\r\n{}",
                                     path, body.size(), body));
}

nlohmann::json body_of(const std::string& answer) {
  return nlohmann::json::parse(answer.substr(answer.find("\r\n\r\n") + 4), nullptr, false);
}

}  // namespace

TEST_CASE("a run is served until a signal", "[serve]") {
  TinyRun t;
  REQUIRE(t.train().code == 0);
  Program server(t.folder.path, {"serve", t.run, "--port", "0", "--max-request-mb", "1"});
  const auto printed = [&] { return io::read_file(t.folder / "stdout.txt"); };
  REQUIRE(
      wait_until([&] { return printed().find("/v1/completions\n") != std::string::npos || server.over(); }));
  if (server.over()) {  // a build without the library says so
    const Outcome outcome = server.wait();
    INFO(outcome.err);
    CHECK(outcome.code == 64);
    CHECK_THAT(outcome.err, Catch::Contains("libcpp-httplib-dev"));
    return;
  }
  const std::string before = "http://127.0.0.1:", text = printed();
  const int port = std::stoi(text.substr(text.find(before) + before.size()));

  const std::string scored =
      post(port, "/v1/completions",
           "{\"model\": \"tiny\", \"prompt\": [[97, 98, 99]], \"max_tokens\": 1, \"temperature\": 0, "
           "\"logprobs\": 1, \"echo\": true, \"seed\": 1}");
  CHECK_THAT(scored, Catch::StartsWith("HTTP/1.1 200"));
  CHECK(body_of(scored)["choices"][0]["logprobs"]["token_logprobs"].size() == 4);
  CHECK(body_of(post(port, "/tokenize", "{\"prompt\": \"ab\"}"))["tokens"] == nlohmann::json({97, 98}));
  CHECK(body_of(post(port, "/detokenize", "{\"tokens\": [97]}"))["prompt"] == "a");
  const std::string models =
      exchanged(port, "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  CHECK(body_of(models)["data"][0]["id"] == "tiny");
  const std::string info =
      exchanged(port, "GET /tokenizer_info HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  CHECK(body_of(info)["eos_token"] == "<|endoftext|>");
  // Several at once: each has its own answer.
  std::vector<std::future<std::string>> answers;
  for (int i = 0; i < 8; ++i)
    answers.push_back(std::async(std::launch::async, [&, i] {
      return post(port, "/v1/completions",
                  fmt::format("{{\"prompt\": \"{}\", \"max_tokens\": {}, \"echo\": true}}",
                              std::string(static_cast<size_t>(i) + 1, 'a'), i == 5 ? -1 : 3));
    }));
  for (int i = 0; i < 8; ++i) {
    const std::string answer = answers[static_cast<size_t>(i)].get();
    INFO(i << ": " << answer);
    if (i == 5) {
      CHECK_THAT(answer, Catch::StartsWith("HTTP/1.1 400") && Catch::Contains("max_tokens must be"));
    } else {
      CHECK_THAT(answer, Catch::StartsWith("HTTP/1.1 200"));
      CHECK(body_of(answer)["usage"]["prompt_tokens"] == i + 1);
    }
  }

  for (const char* field : {"ignore_eos", "min_tokens", "foo"}) {
    const std::string refused =
        post(port, "/v1/completions", fmt::format("{{\"prompt\": \"a\", \"{}\": 1}}", field));
    INFO(refused);
    CHECK_THAT(refused, Catch::StartsWith("HTTP/1.1 400") && Catch::Contains(field));
  }
  for (const char* bad : {"{", "[]", "{\"prompt\": \"a\", \"max_tokens\": -1}", "{\"prompt\": [999]}",
                          "{\"a\": 1, \"a\": 2}"}) {
    const std::string refused = post(port, "/v1/completions", bad);
    INFO(bad << " -> " << refused);
    CHECK_THAT(refused, Catch::StartsWith("HTTP/1.1 400"));
    CHECK(body_of(refused)["error"]["message"].is_string());
  }
  CHECK_THAT(post(port, "/elsewhere", "{}"),
             Catch::StartsWith("HTTP/1.1 404") && Catch::Contains("no such address"));
  CHECK_THAT(
      exchanged(port,
                "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\nConnection: close\r\n\r\n"),
      Catch::StartsWith("HTTP/1.1 413"));
  CHECK_THAT(exchanged(port, "nonsense\r\n\r\n"), Catch::StartsWith("HTTP/1.1 400"));
  server.signal(SIGTERM);
  CHECK(server.wait().code == 0);
}

}  // namespace sluice
