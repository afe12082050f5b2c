"""What all tests of the repository share: samples of long tails, where a run asks for them."""

pytest_plugins = ["headrace_testing.sampling"]
