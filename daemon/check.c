/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The checks of --check-config beyond the file's own text: directories, keys, allow-list,
 * the cluster, libraries; and settings that are allowed but rarely intended.
 *
 * It makes no connections: under socket activation that would start the daemon that is
 * checked. So a socket_path that another daemon holds is only reported at start.
 */
#include "daemon/check.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "daemon/base/cgroup.h"
#include "daemon/base/endpoint.h"
#include "daemon/base/err.h"
#include "daemon/config/config.h"
#include "daemon/link/link_curve.h"
#include "daemon/modules.h"

struct check {
	const struct config *config;
	unsigned int errors;
};

/* ---- texts ---- */

/* "file:line: "; "file: " for a default; "" where there is no file. */
static void print_where(const struct config *config, const char *option)
{
	uint32_t line = config_line_of(config, option);

	if (line != CONFIG_LINE_DEFAULT && line != CONFIG_LINE_ARGUMENT)
		fprintf(stderr, "%s:%u: ", config->path, line);
	else if (*config->path)
		fprintf(stderr, "%s: ", config->path);
}

__attribute__((format(printf, 3, 4))) static void check_error(struct check *check,
							      const char *option,
							      const char *fmt, ...)
{
	va_list ap;

	check->errors++;
	print_where(check->config, option);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
}

__attribute__((format(printf, 3, 4))) static void check_warning(const struct check *check,
								const char *option,
								const char *fmt, ...)
{
	va_list ap;

	print_where(check->config, option);
	fputs("warning: ", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
}

/* ---- directories ---- */

static bool check_directory(struct check *check, const char *option, const char *path)
{
	struct stat st;

	if (stat(path, &st) < 0)
		check_error(check, option, "%s: %s: %s%s", option, path, strerror(errno),
			    errno == ENOENT && strcmp(path, "/run/kvd") == 0
				    ? "; systemd-tmpfiles --create creates it"
				    : "");
	else if (!S_ISDIR(st.st_mode))
		check_error(check, option, "%s: %s: not a directory", option, path);
	else if (faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) < 0)
		check_error(check, option, "%s: %s: not writable for uid %u: %s", option,
			    path, (unsigned int)geteuid(), strerror(errno));
	else
		return true;
	return false;
}

static void check_places(struct check *check)
{
	const struct config *config = check->config;
	char dir[CONFIG_PATH_BYTES], *slash;
	struct stat st;

	if (!check_directory(check, "run_dir", config->run_dir))
		return;
	snprintf(dir, sizeof(dir), "%s", config->socket_path);
	slash = strrchr(dir, '/');
	slash[slash == dir] = '\0';
	if (strcmp(dir, config->run_dir) != 0 &&
	    !check_directory(check, "socket_path", dir))
		return;
	if (lstat(config->socket_path, &st) == 0 && !S_ISSOCK(st.st_mode))
		check_error(check, "socket_path",
			    "socket_path: %s: exists and is not a socket",
			    config->socket_path);
}

/* ---- keys ---- */

static void check_secret(struct check *check)
{
	const char *path = check->config->curve_secret_file;
	struct curve_keys keys;
	struct stat st;

	if (curve_keys_load(path, &keys) < 0) {
		check_error(check, "curve_secret_file", "curve_secret_file: %s",
			    err_last()->text);
		return;
	}
	curve_keys_wipe(&keys);
	if (stat(path, &st) == 0 && st.st_uid != geteuid() && st.st_uid != 0)
		check_warning(check, "curve_secret_file",
			      "curve_secret_file: %s belongs to uid %u, not to uid %u "
			      "of this check",
			      path, (unsigned int)st.st_uid, (unsigned int)geteuid());
}

/* It is created at the first start, in an existing directory. */
static void check_keys_dir(struct check *check)
{
	char dir[CONFIG_PATH_BYTES], *slash;
	struct stat st;

	snprintf(dir, sizeof(dir), "%s", check->config->keys_dir);
	if (stat(dir, &st) < 0 && errno == ENOENT) {
		slash = strrchr(dir, '/');
		slash[slash == dir] = '\0';
		check_directory(check, "keys_dir", dir);
	} else if (check_directory(check, "keys_dir", dir) &&
		   (st.st_uid != geteuid() || (st.st_mode & (S_IWGRP | S_IWOTH)))) {
		check_error(check, "keys_dir",
			    "keys_dir: %s: uid %u, mode %04o: must belong to uid %u and "
			    "not be writable by others",
			    dir, (unsigned int)st.st_uid,
			    (unsigned int)st.st_mode & 07777, (unsigned int)geteuid());
	}
}

static void check_keys(struct check *check)
{
	struct curve_allow *allow = NULL;
	const char *name;
	unsigned int keys;

	if (*check->config->curve_secret_file)
		check_secret(check);
	if (*check->config->keys_dir)
		check_keys_dir(check);
	if (!*check->config->curve_allow_file)
		return;
	if (curve_allow_load(check->config->curve_allow_file, &allow) < 0)
		check_error(check, "curve_allow_file", "curve_allow_file: %s",
			    err_last()->text);
	name = allow ? curve_allow_shared(allow, &keys) : NULL;
	if (name)
		check_warning(check, "curve_allow_file",
			      "curve_allow_file: '%s' has %u keys: " CURVE_SHARED_WHY,
			      name, keys);
	curve_allow_free(allow);
}

/* ---- modules ---- */

/* etcd itself is not contacted: a daemon starts without it. */
static void check_modules(struct check *check)
{
	const char *option;

	if (modules_check_options(check->config, &option) < 0)
		check_error(check, option, "%s", err_last()->text);
	err_clear();
}

/* ---- libraries ---- */

/* Only libraries that are named explicitly: a host without GPU has no driver to load. */
static void check_library(struct check *check, const char *option, const char *name)
{
	void *handle;

	if (!*name || config_line_of(check->config, option) == CONFIG_LINE_DEFAULT)
		return;
	handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
	if (!handle)
		check_error(check, option, "%s: %s", option, dlerror());
	else
		dlclose(handle);
}

static void check_libraries(struct check *check)
{
	const struct config *config = check->config;

	check_library(check, "ucx_library", config->ucx_library);
	check_library(check, "cuda_library", config->cuda_library);
	if (strcmp(config->gpu_kernels, "auto") != 0 &&
	    strcmp(config->gpu_kernels, "off") != 0 &&
	    faccessat(AT_FDCWD, config->gpu_kernels, R_OK, AT_EACCESS) < 0)
		check_error(check, "gpu_kernels", "gpu_kernels: %s: %s",
			    config->gpu_kernels, strerror(errno));
}

/* ---- allowed, but rarely intended ---- */

static void check_reach(const struct check *check)
{
	const struct config *config = check->config;
	const char *port = strrchr(config->listen, ':');

	if (endpoint_is_loopback(config->listen))
		check_warning(check, "listen",
			      "listen = %s: loopback address: other hosts cannot reach "
			      "this daemon",
			      config->listen);
	if (port && strtoul(port + 1, NULL, 10) == 0)
		check_warning(check, "listen",
			      "listen = %s: port 0: the endpoint changes with each start",
			      config->listen);
	if (config->insecure)
		check_warning(
			check, "insecure",
			"insecure = yes: any host and local user that can connect to "
			"the ports can read and write the engines' caches");
}

/* ---- memory, disk ---- */

/* The service's control group may differ from that of this process. */
static void check_memory(const struct check *check)
{
	if (config_memory_check(check->config, memory_limit()) != 0)
		check_warning(check, "chunk_memory", "%s", err_last()->text);
	err_clear();
}

/* Its existing files count as free space. */
static uint64_t files_bytes(const char *path)
{
	DIR *entries = opendir(path);
	const struct dirent *entry;
	uint64_t bytes = 0;
	struct stat st;

	while (entries && (entry = readdir(entries))) {
		if (fstatat(dirfd(entries), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) ==
			    0 &&
		    S_ISREG(st.st_mode))
			bytes += (uint64_t)st.st_blocks * 512;
	}
	if (entries)
		closedir(entries);
	return bytes;
}

static void check_chunk_dir(struct check *check)
{
	const struct config *config = check->config;
	const char *path = config->chunk_dir;
	struct statvfs fs;
	uint64_t room;

	if (!*path || !check_directory(check, "chunk_dir", path) ||
	    statvfs(path, &fs) < 0)
		return;
	room = (uint64_t)fs.f_bavail * fs.f_frsize + files_bytes(path);
	if (room < config->chunk_dir_bytes)
		check_warning(check, "chunk_dir_size",
			      "chunk_dir_size: %llu MiB, but the file system of %s has "
			      "room for %llu MiB; kvd stops writing when it is full",
			      (unsigned long long)config->chunk_dir_bytes >> 20, path,
			      (unsigned long long)room >> 20);
}

unsigned int check_config(const struct config *config)
{
	struct check check = {.config = config};

	if (!*config->path)
		fprintf(stderr,
			"warning: no /etc/kvd/%s.conf and no /etc/kvd/kvd.conf: built-in "
			"defaults, loopback only\n",
			config->name);
	check_places(&check);
	check_keys(&check);
	check_modules(&check);
	check_libraries(&check);
	check_memory(&check);
	check_chunk_dir(&check);
	check_reach(&check);
	return check.errors;
}

/* ---- change of user ---- */

int check_become(const char *user)
{
	const struct passwd *pw = getpwnam(user);

	if (!pw) {
		fprintf(stderr, "kvd: --user %s: no such user\n", user);
		return -1;
	}
	if (pw->pw_uid == geteuid())
		return 0;
	if (initgroups(user, pw->pw_gid) == 0 && setegid(pw->pw_gid) == 0 &&
	    seteuid(pw->pw_uid) == 0)
		return 0;
	fprintf(stderr, "kvd: --user %s: %s: only root may check as another user\n", user,
		strerror(errno));
	return -1;
}
