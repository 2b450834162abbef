// What every file of the library shares: exceptions become a code and a text.
#pragma once

#include <exception>
#include <string>

inline thread_local std::string last_error;

template <typename Body>
int guard(Body&& body) {
    try {
        body();
        return 0;
    } catch (const std::exception& error) {
        last_error = error.what();
    } catch (...) {
        last_error = "unknown C++ exception";
    }
    return 1;
}
