/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_config: the input as a configuration file. What is taken is printed as
 * `--print-config` prints it, and that must be taken, too, and print the same; what is
 * refused has said why, with ERR_CONFIG.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "tests/fuzz/lib/fuzz.h"

static void must(bool holds)
{
	if (!holds)
		abort();
}

static void on_problem(void *arg, const char *text)
{
	must(text[0] != '\0');
	++*(unsigned int *)arg;
}

static int load(int fd, const char *data, size_t size, struct config *config,
		unsigned int *problems)
{
	static const char *const transports[] = {"shm", "tcp", "verbs", "ucx", NULL};
	char path[32];
	const struct config_source source = {.path = path,
					     .transports = transports,
					     .on_problem = on_problem,
					     .arg = problems};

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	must(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
	return config_load(config, &source);
}

static char *print(const struct config *config, size_t *size_p)
{
	char *text = NULL;
	FILE *out = open_memstream(&text, size_p);

	must(out != NULL);
	config_print_effective(config, out);
	fclose(out);
	return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct config first, again;
	static int fd = -1;
	unsigned int problems = 0;
	size_t len, len_again;
	char *text, *text_again;

	log_set_level(LOG_LEVEL_ERROR);
	if (fd < 0)
		fd = memfd_create("config", MFD_CLOEXEC);
	must(fd >= 0);
	if (load(fd, (const char *)data, size, &first, &problems) < 0) {
		must(err_last()->code == ERR_CONFIG && problems > 0);
		err_clear();
		return 0;
	}
	text = print(&first, &len);
	must(load(fd, text, len, &again, &problems) == 0);
	text_again = print(&again, &len_again);
	(void)config_reload(&first, &again, on_problem, &problems);
	(void)config_admits(&first, 1, NULL, 0);
	free(text);
	free(text_again);
	return 0;
}
