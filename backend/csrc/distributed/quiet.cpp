#include "distributed/quiet.h"

#include <iostream>
#include <streambuf>
#include <string_view>

namespace tpu {
namespace {

// Where the calling thread is in what it prints: several threads write to the stream at once.
thread_local bool at_start_of_line = true;
thread_local bool is_in_line_of_gloo = false;

// Hands everything on but lines that begin with "[Gloo]", while it lives.
class WithoutGloo : public std::streambuf {
 public:
  explicit WithoutGloo(std::ostream& stream) : stream_(stream), shown_(stream.rdbuf(this)) {}
  WithoutGloo(const WithoutGloo&) = delete;
  WithoutGloo& operator=(const WithoutGloo&) = delete;
  ~WithoutGloo() override { stream_.rdbuf(shown_); }

 protected:
  std::streamsize xsputn(const char* text, std::streamsize size) override {
    std::string_view rest(text, static_cast<size_t>(size));
    while (!rest.empty()) {
      const std::string_view line = rest.substr(0, rest.find('\n') == rest.npos ? rest.npos : rest.find('\n') + 1);
      if (at_start_of_line) {
        is_in_line_of_gloo = line.starts_with("[Gloo]");
      }
      const auto length = static_cast<std::streamsize>(line.size());
      if (!is_in_line_of_gloo && shown_->sputn(line.data(), length) != length) {
        return size - static_cast<std::streamsize>(rest.size());
      }
      at_start_of_line = line.back() == '\n';
      rest.remove_prefix(line.size());
    }
    return size;
  }

  int_type overflow(int_type character) override {
    if (traits_type::eq_int_type(character, traits_type::eof())) {
      return traits_type::not_eof(character);
    }
    const char one = traits_type::to_char_type(character);
    return xsputn(&one, 1) == 1 ? character : traits_type::eof();
  }

  int sync() override { return shown_->pubsync(); }

 private:
  std::ostream& stream_;
  std::streambuf* shown_;
};

} // namespace

void silence_gloo() {
  static const WithoutGloo without_gloo(std::cout);
}

} // namespace tpu
