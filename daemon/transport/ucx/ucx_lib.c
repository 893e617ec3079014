/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libucp reads its configuration from the environment: a part in constructors, so it has
 * to be right before dlopen(); the rest at each ucp_config_read(). Some of it is not the
 * operator's to choose, because the daemon's promises depend on it: the table below lists
 * the settings and reasons. The library stays loaded, since its threads and exit handlers
 * would outlive it.
 */
#include "daemon/transport/ucx/ucx_lib.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/library.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define SYSTEM_LIBRARY "libucp.so.0"

static struct ucx_lib lib;
static char *loaded_path;

/*
 * Settings that override the operator's environment, and why. The rest of UCX_* is left
 * to the operator: a fabric may need it. Not const, as environ's strings are not.
 */
struct variable {
	char text[40]; /* "NAME=VALUE" */
	bool force;
};

static struct variable environment[] = {
	/* Read by a constructor. Hooks on mmap and munmap inside a daemon that maps
	 * and unmaps engines' memory on helper threads would run under them. */
	{"UCX_MEM_MMAP_HOOK_MODE=none", true},
	{"UCX_MEM_MALLOC_HOOKS=n", true},
	{"UCX_MEM_MALLOC_RELOC=n", true},
	/* Otherwise libucs handles SIGBUS, which memory.c guards, and SIGSEGV. */
	{"UCX_ERROR_SIGNALS=", true},
	{"UCX_HANDLE_ERRORS=none", true},
	/* Otherwise libucs handles SIGHUP, which is "reload" to a daemon. */
	{"UCX_DEBUG_SIGNO=0", true},
	/* tcp "put" writes to a raw address out of the message: without it every byte
	 * passes through a receive request of this daemon, which a closed endpoint
	 * ends. */
	{"UCX_TCP_PUT_ENABLE=n", true},
	/* On hardware the local NIC fetches: the end of the local queue pair proves that
	 * nothing more lands. "put" would let the remote NIC write. */
	{"UCX_RNDV_SCHEME=get_zcopy", true},
	/* Logs go to stdout otherwise, and a lost peer is not an error of this daemon. */
	{"UCX_LOG_LEVEL=fatal", false},
	{"UCX_WARN_UNUSED_ENV_VARS=n", false},
};

/*
 * libucp before 1.16, where the second set of its protocols became the usual one. There,
 * a rendezvous over tcp sends active messages directly from the source. When the peer
 * dies during one, libucp returns the request, and libuct, which also holds it, completes
 * it again: "Assertion `comp->count > 0' failed", and the daemon aborts because another
 * one died: seen with 1.13.1, not with copied messages nor with 1.22 (docs/runs, "ucx").
 * RDMA's fetching rendezvous does not ask for this threshold. Copied messages of 8 KiB,
 * libucp's usual ones, run at half the speed; 64 KiB is also the longest that a peer
 * accepts by default (UCX_TCP_RX_SEG_SIZE).
 */
static struct variable environment_before_1_16[] = {
	{"UCX_ZCOPY_THRESH=inf", true},
	{"UCX_TCP_TX_SEG_SIZE=64k", false},
};

/* The setting with this name, if it replaces `entry`. */
static bool is_forced(const struct variable *variables, size_t count, const char *entry)
{
	for (size_t i = 0; i < count; i++) {
		const struct variable *v = &variables[i];
		size_t name = strcspn(v->text, "=") + 1;

		if (strncmp(v->text, entry, name) == 0)
			return v->force;
	}
	return false;
}

static bool is_there(char *const *entries, const struct variable *v)
{
	size_t name = strcspn(v->text, "=") + 1;

	for (; *entries; entries++)
		if (strncmp(v->text, *entries, name) == 0)
			return true;
	return false;
}

/*
 * setenv() moves the array that getenv() walks in other threads (helpers, the name
 * look-up, a GPU's driver). So a new array replaces it in one store, and the old one is
 * never changed or freed, for callers that are walking it. The arrays are chained, each
 * behind the end of the next.
 */
static char **latest;

static int set_environment(struct variable *variables, size_t count)
{
	size_t before = 0, n = 0;
	char **entries;

	while (environ && environ[before])
		before++;
	entries = mem_calloc(before + count + 2, sizeof(*entries));
	if (!entries)
		return err_pass(-ENOMEM);
	for (size_t i = 0; i < before; i++)
		if (!is_forced(variables, count, environ[i]))
			entries[n++] = environ[i];
	for (size_t i = 0; i < count; i++)
		if (!is_there(entries, &variables[i]))
			entries[n++] = variables[i].text;
	entries[before + count + 1] = (char *)latest;
	latest = entries;
	__atomic_store_n(&environ, entries, __ATOMIC_RELEASE);
	return 0;
}

static int set_environment_for(const char *version)
{
	unsigned int major = 0, minor = 0;

	if (sscanf(version, "%u.%u", &major, &minor) == 2 && (major > 1 || minor >= 16))
		return 0;
	return set_environment(environment_before_1_16,
			       ARRAY_LEN(environment_before_1_16));
}

#define UCX_LIB_FUNCTION(fn) {#fn, &lib.fn, false},
static const struct library_function functions[] = {
	UCX_LIB_FUNCTIONS(UCX_LIB_FUNCTION)
	/* of libucs, which libucp depends on: dlsym searches it too */
	{"ucs_status_string", &lib.ucs_status_string, false},
};

int ucx_lib_load(const char *library, const struct ucx_lib **lib_p)
{
	const char *path = library && *library ? library : SYSTEM_LIBRARY;
	ucp_lib_attr_t attr = {.field_mask = UCP_LIB_ATTR_FIELD_MAX_THREAD_LEVEL};
	static bool is_set;
	int r;

	if (loaded_path && strcmp(loaded_path, path) != 0)
		return err_raise(ERR_STATE, "ucx_library: %s is loaded already, not %s",
				 loaded_path, path);
	if (!loaded_path) {
		r = is_set ? 0 : set_environment(environment, ARRAY_LEN(environment));
		if (r < 0)
			return err_pass(r);
		is_set = true;
		r = library_load(path, functions, ARRAY_LEN(functions));
		if (r < 0)
			return err_prefix(r, "ucx_library");
		lib.version = lib.ucp_get_version_string();
		r = set_environment_for(lib.version);
		if (r < 0)
			return err_pass(r);
		loaded_path = mem_strdup(path);
		if (!loaded_path)
			return err_pass(-ENOMEM);
		lib.threads = lib.ucp_lib_query(&attr) == UCS_OK &&
			      attr.max_thread_level == UCS_THREAD_MODE_MULTI;
		log_info("ucx", path, "loaded", "version=%s threads=%d", lib.version,
			 lib.threads);
	}
	*lib_p = &lib;
	return 0;
}
