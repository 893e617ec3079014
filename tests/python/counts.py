# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: the last line is "N passed, N failed[, N skipped]"."""


def pytest_unconfigure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    count = {k: len(reporter.stats.get(k, [])) for k in ("passed", "failed", "error",
                                                         "skipped")}
    line = "%d passed, %d failed" % (count["passed"], count["failed"] + count["error"])
    if count["skipped"]:
        line += ", %d skipped" % count["skipped"]
    print("\n" + line, flush=True)
