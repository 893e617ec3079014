# SPDX-License-Identifier: Apache-2.0
"""Logging as NIXL's: to stdout under the logger "nixl", level by NIXL_LOG_LEVEL."""
import logging
import logging.config
import os

LOGGING_CONFIG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "simpleFormatter": {
            "format": "%(asctime)s NIXL %(levelname)-7s %(filename)s:%(lineno)d %(message)s",
            "datefmt": "%Y-%m-%d %H:%M:%S",
        },
    },
    "handlers": {
        "consoleHandler": {
            "class": "logging.StreamHandler",
            "level": "DEBUG",  # NIXL's own is INFO, which hides levels that its variable selects
            "formatter": "simpleFormatter",
            "stream": "ext://sys.stdout",
        },
    },
    "loggers": {
        "nixl": {"level": "INFO", "handlers": ["consoleHandler"], "propagate": False},
    },
}

_LEVELS = {"TRACE": logging.DEBUG, "DEBUG": logging.DEBUG, "INFO": logging.INFO,
           "WARN": logging.WARNING, "ERROR": logging.ERROR, "FATAL": logging.CRITICAL}
_configured = False


def set_log_level_by_env(nixl_logger):
    wanted = os.getenv("NIXL_LOG_LEVEL")
    if not wanted:
        return
    level = _LEVELS.get(wanted.upper())
    if level is None:
        nixl_logger.warning("NIXL_LOG_LEVEL: '%s' is not one of %s", wanted, " ".join(_LEVELS))
        return
    nixl_logger.setLevel(level)
    nixl_logger.info("Log level set to %s by NIXL_LOG_LEVEL", wanted.upper())


def setup_logging():
    global _configured
    if _configured:
        return
    _configured = True
    logging.config.dictConfig(LOGGING_CONFIG)
    set_log_level_by_env(logging.getLogger("nixl"))
    logging.raiseExceptions = os.getenv("NIXL_DEBUG_LOGGING", "").lower() in ("true", "1",
                                                                             "yes")


def get_logger(name):
    setup_logging()
    return logging.getLogger("nixl." + name.lstrip("_"))
