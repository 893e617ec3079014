/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program kvd: arguments, the configuration, the lock of the name, the daemon.
 *
 * The exit status tells a service manager whether a restart can help: not after wrong
 * arguments (64), nor while the configuration is not usable (78), whether that is
 * detected in the file or when the objects it names are opened. --check-config finds the
 * faults that a start would find, except another listener at the socket (check.c).
 */
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/base/cgroup.h"
#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/stdio.h"
#include "daemon/check.h"
#include "daemon/config/config.h"
#include "daemon/features.h"
#include "daemon/gate/sandbox.h"
#include "daemon/gate/warden.h"
#include "daemon/kvd.h"
#include "daemon/link/link_keydir.h"
#include "daemon/loop/lock.h"
#include "daemon/loop/notify.h"
#include "gpu/gpu.h"

/* The daemon itself needs some 50, more with more processors, transports and options. */
#define DESCRIPTORS_LEAST 128u

/* EX_USAGE and EX_CONFIG of sysexits.h: systemd must not restart after these */
enum { EXIT_BAD_USAGE = 64, EXIT_BAD_CONFIG = 78 };

static const char usage[] =
	"Usage: kvd [OPTION]...\n"
	"Moves an LLM engine's KV cache between prefill and decode workers.\n"
	"\n"
	"  -n, --name NAME      name of this instance: its socket and lock\n"
	"  -c, --config FILE    default: /etc/kvd/NAME.conf or /etc/kvd/kvd.conf\n"
	"      --check-config   check the configuration and its files as the service\n"
	"                       would open them, print faults, and exit\n"
	"      --user NAME      check with the rights of this user\n"
	"      --print-effective  print the effective configuration, and exit\n"
	"      --print-config   print a sample file with every option, and exit\n"
	"  -V, --version        print the version and built-in features, and exit\n"
	"  -h, --help           print this, and exit\n"
	"\n"
	"KVD_NAME and KVD_CONFIG are defaults of --name and --config. SIGTERM drains,\n"
	"a second one stops; SIGHUP reloads the configuration.\n";

enum action { RUN, CHECK, PRINT_EFFECTIVE, PRINT_CONFIG, VERSION, HELP, BAD_USAGE };

struct args {
	struct config_source source;
	const char *user;
	unsigned int told; /* problems */
};

static enum action parse_args(int argc, char **argv, struct args *args)
{
	static const struct option long_options[] = {
		{"name", required_argument, NULL, 'n'},
		{"config", required_argument, NULL, 'c'},
		{"check-config", no_argument, NULL, 'C'},
		{"user", required_argument, NULL, 'U'},
		{"print-effective", no_argument, NULL, 'E'},
		{"print-config", no_argument, NULL, 'P'},
		{"version", no_argument, NULL, 'V'},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	enum action action = RUN;
	int c;

	while ((c = getopt_long(argc, argv, "n:c:Vh", long_options, NULL)) != -1) {
		if (c == 'n')
			args->source.name = optarg;
		else if (c == 'c')
			args->source.path = optarg;
		else if (c == 'U')
			args->user = optarg;
		else if (c == '?')
			return BAD_USAGE;
		else
			action = c == 'C'   ? CHECK
				 : c == 'E' ? PRINT_EFFECTIVE
				 : c == 'P' ? PRINT_CONFIG
				 : c == 'V' ? VERSION
					    : HELP;
	}
	if (args->user && action != CHECK) {
		fputs("kvd: --user requires --check-config\n", stderr);
		return BAD_USAGE;
	}
	if (optind == argc)
		return action;
	fprintf(stderr, "kvd: unexpected argument '%s'\n", argv[optind]);
	return BAD_USAGE;
}

/* In the format of compilers; the journal takes the priority. */
static void on_problem(void *arg, const char *text)
{
	unsigned int *told = arg;

	++*told;
	fprintf(stderr, "%s%s\n",
		log_format_of_stderr() == LOG_FORMAT_JOURNAL ? "<3>" : "", text);
}

/* Keys, secrets of sessions and mapped caches must not be readable: no core, and no
 * debugger of this user (root's works). Under a unit that forbids the call its
 * LimitCORE= is in effect. */
static void main_seal(void)
{
	const struct rlimit none = {0, 0};

	(void)prctl(PR_SET_DUMPABLE, 0);
	(void)setrlimit(RLIMIT_CORE, &none);
}

/* The directory of a socket's path; "" if it is no path. */
static const char *folder_of(const char *path, char *folder, size_t size)
{
	const char *slash = strrchr(path, '/');

	if (strncmp(path, "unix:", 5) == 0)
		path += 5;
	if (!slash || *path != '/')
		return "";
	snprintf(folder, size, "%.*s", slash == path ? 1 : (int)(slash - path), path);
	return folder;
}

/* A driver may be loaded when the first engine passes memory of a GPU. */
static bool has_gpu(const struct config *config)
{
	return strcmp(config->gpu, "off") != 0 &&
	       (access("/dev/nvidiactl", F_OK) == 0 ||
		strcmp(config->cuda_library, GPU_LIBRARY) != 0);
}

/* Directories where files may be created or changed from now on. */
static int main_give_up_files(const struct config *config)
{
	char socket[CONFIG_PATH_BYTES], metrics[CONFIG_PATH_BYTES], keys[PATH_MAX];
	const char *const places[] = {
		config->run_dir,
		"/dev/shm",
		folder_of(config->socket_path, socket, sizeof(socket)),
		folder_of(config->metrics_listen, metrics, sizeof(metrics)),
		keys,
		*config->chunk_dir ? config->chunk_dir : NULL,
		NULL,
	};

	/* NVIDIA does not document how its driver opens an exporter's memory
	 * (cuda_ipc): a process in a Landlock domain may not access others */
	if (has_gpu(config)) {
		sandbox_no_files("no Landlock in the main process when a GPU is used");
		return 0;
	}
	link_keydir_home(config, keys, sizeof(keys));
	return err_pass(sandbox_files(places));
}

/* Libraries end the process without a message when there are none left at start. */
static int main_check_descriptors(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur >= DESCRIPTORS_LEAST)
		return 0;
	return err_raise(
		ERR_CONFIG,
		"RLIMIT_NOFILE: %llu descriptors (at least %u); raise LimitNOFILE= "
		"of the unit, or ulimit -n",
		(unsigned long long)limit.rlim_cur, DESCRIPTORS_LEAST);
}

/* The kernel kills a process over its memory limit without a message. */
static int main_check_memory(const struct config *config)
{
	int r = config_memory_check(config, memory_limit());

	if (r <= 0)
		return err_pass(r);
	log_warn("daemon", config->name, err_last()->text, NULL);
	err_clear();
	return 0;
}

static int main_serve(const struct config *config)
{
	struct kvd_sockets sockets = {.control_fd = -1, .warden_fd = -1};
	struct kvd *kvd = NULL;
	struct lock lock;
	int r, status = EXIT_SUCCESS;

	mem_tune();
	if (!config->core_dumps)
		main_seal();
	lock_init(&lock);
	sockets.lock = &lock;
	r = main_check_descriptors();
	if (r == 0)
		r = main_check_memory(config);
	if (r == 0)
		r = sandbox_prepare(config->sandbox);
	if (r == 0) /* while there are no threads and no lock */
		r = warden_fork(&sockets.warden_fd);
	if (r == 0)
		r = main_give_up_files(config);
	if (r == 0)
		r = lock_take(&lock, config->run_dir, config->name);
	if (r == 0)
		r = notify_listen_fd(&sockets.control_fd);
	if (r == 0)
		r = kvd_new(config, &sockets, &kvd);
	if (r == 0)
		r = kvd_run(kvd);
	if (r < 0) {
		status = err_last()->code == ERR_CONFIG ? EXIT_BAD_CONFIG : EXIT_FAILURE;
		log_error("daemon", config->name, err_last()->text, "code=%s",
			  err_name(err_last()->code));
	}
	kvd_free(kvd);
	lock_drop(&lock);
	return status;
}

static int load_and(enum action action, struct args *args)
{
	static const char *transports[TRANSPORTS_MAX];
	cleanup_free struct config *config = mem_zalloc(sizeof(*config));

	features_transports(transports);
	args->source.transports = transports;
	args->source.on_problem = on_problem;
	args->source.arg = &args->told;
	log_set_format(log_format_of_stderr());
	if (log_format_of_stderr() == LOG_FORMAT_JOURNAL)
		log_journal_open(NULL);
	if (!config || config_load(config, &args->source) < 0) {
		if (!args->told)
			on_problem(&args->told, err_last()->text);
		return EXIT_BAD_CONFIG;
	}
	log_set_level((enum log_level)config->log_level);
	log_set_format((enum log_format)config->log_format);
	if (action == RUN)
		return main_serve(config);
	if (action != CHECK)
		config_print_effective(config, stdout);
	else if (check_config(config))
		return EXIT_BAD_CONFIG;
	else
		printf("%s: ok\n", *config->path ? config->path : "built-in defaults");
	return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
	struct args args = {.user = NULL};
	enum action action;

	stdio_open();
	action = parse_args(argc, argv, &args);
	switch (action) {
	case RUN:
	case CHECK:
	case PRINT_EFFECTIVE:
		if (args.user && check_become(args.user) < 0)
			return EXIT_BAD_USAGE;
		return load_and(action, &args);
	case PRINT_CONFIG:
		config_print_sample(stdout);
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
