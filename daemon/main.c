/* SPDX-License-Identifier: Apache-2.0 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/features.h"
#include "daemon/kvd.h"
#include "daemon/loop/lock.h"
#include "daemon/loop/notify.h"

/* EX_USAGE and EX_CONFIG of sysexits.h: systemd must not restart after these */
enum { EXIT_BAD_USAGE = 64, EXIT_BAD_CONFIG = 78 };

static const char usage[] =
	"Usage: kvd [OPTION]...\n"
	"Moves an LLM engine's KV cache between prefill and decode workers.\n\n"
	"  -n, --name NAME      name of this instance: its socket and lock\n"
	"  -c, --config FILE    instead of /etc/kvd/NAME.conf or /etc/kvd/kvd.conf\n"
	"      --check-config   tell what is wrong with the configuration, and exit\n"
	"      --print-config   print a sample file with every option, and exit\n"
	"      --print-man      print the options as kvd.conf(5) has them, and exit\n"
	"  -V, --version        print the version and what is built in, and exit\n"
	"  -h, --help           print this, and exit\n\n"
	"KVD_NAME and KVD_CONFIG stand in for --name and --config. SIGTERM drains, a\n"
	"second one stops; SIGHUP reads the configuration again.\n";

enum action { RUN, CHECK, PRINT_CONFIG, PRINT_MAN, VERSION, HELP, BAD_USAGE };

static enum action parse_args(int argc, char **argv, struct config_source *source)
{
	static const struct option long_options[] = {
		{"name", required_argument, NULL, 'n'},
		{"config", required_argument, NULL, 'c'},
		{"check-config", no_argument, NULL, 'C'},
		{"print-config", no_argument, NULL, 'P'},
		{"print-man", no_argument, NULL, 'M'},
		{"version", no_argument, NULL, 'V'},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	enum action action = RUN;
	int c;

	while ((c = getopt_long(argc, argv, "n:c:Vh", long_options, NULL)) != -1) {
		if (c == 'n')
			source->name = optarg;
		else if (c == 'c')
			source->path = optarg;
		else if (c == '?')
			return BAD_USAGE;
		else
			action = c == 'C'   ? CHECK
				 : c == 'P' ? PRINT_CONFIG
				 : c == 'M' ? PRINT_MAN
				 : c == 'V' ? VERSION
					    : HELP;
	}
	if (optind == argc)
		return action;
	fprintf(stderr, "kvd: unexpected argument '%s'\n", argv[optind]);
	return BAD_USAGE;
}

static void on_problem(void *arg, const char *text)
{
	(void)arg;
	log_error("config", NULL, "refused", "why=\"%s\"", text);
}

static int main_serve(const struct config *config)
{
	struct kvd_sockets sockets = {.control_fd = -1};
	struct kvd *kvd = NULL;
	struct lock lock;
	int r;

	mem_tune();
	lock_init(&lock);
	r = lock_take(&lock, config->run_dir, config->name);
	if (r == 0)
		r = notify_listen_fd(&sockets.control_fd);
	if (r == 0)
		r = kvd_new(config, &sockets, &kvd);
	if (r == 0)
		r = kvd_run(kvd);
	if (r < 0)
		log_error("daemon", config->name, err_last()->text, "code=%s",
			  err_name(err_last()->code));
	kvd_free(kvd);
	lock_drop(&lock);
	return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

static int load_and(enum action action, struct config_source *source)
{
	static const char *transports[TRANSPORTS_MAX];
	cleanup_free struct config *config = mem_zalloc(sizeof(*config));

	features_transports(transports);
	source->transports = transports;
	source->on_problem = on_problem;
	if (action == CHECK)
		log_set_format(LOG_FORMAT_PLAIN);
	if (!config || config_load(config, source) < 0) {
		log_error("config", NULL, "not usable", "first=\"%s\"", err_last()->text);
		return EXIT_BAD_CONFIG;
	}
	log_set_level((enum log_level)config->log_level);
	log_set_format((enum log_format)config->log_format);
	if (action == RUN)
		return main_serve(config);
	printf("%s: fine\n", *config->path ? config->path : "built-in defaults");
	return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
	struct config_source source = {.path = NULL};
	enum action action = parse_args(argc, argv, &source);

	switch (action) {
	case RUN:
	case CHECK:
		return load_and(action, &source);
	case PRINT_CONFIG:
		config_print_sample(stdout);
		break;
	case PRINT_MAN:
		config_print_man(stdout);
		break;
	case VERSION:
		features_print(stdout);
		break;
	case HELP:
		fputs(usage, stdout);
		break;
	case BAD_USAGE:
		fputs("Try 'kvd --help'.\n", stderr);
		return EXIT_BAD_USAGE;
	}
	return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
