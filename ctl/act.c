/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commands that act: ping, call, abort, drain, log, keygen.
 *
 * Each is one request and one line of text. keygen needs no daemon: the key pair is
 * generated here. The secret key is written to a file that must not exist yet (mode
 * 0600) and is never sent to a daemon.
 */
#include <errno.h>
#include <poll.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "ctl/ctl.h"
#include "daemon/base/clock.h"
#include "lib/kvd.h"

#define DRAIN_LOOK_MS 500
#define INPUT_MAX (1u << 20) /* the daemon accepts no longer line */

int ctl_run_ping(struct ctl *ctl)
{
	unsigned long count = ctl->count ? ctl->count : 1;
	double least = 1e300, most = 0, sum = 0;
	cJSON *reply;

	if (!ctl_open(ctl))
		return CTL_NO_DAEMON;
	for (unsigned long i = 0; i < count; i++) {
		double began = clock_us(), took;
		int r = ctl_ask(ctl, "ping", NULL, &reply);

		if (r)
			return r;
		cJSON_Delete(reply);
		took = clock_us() - began;
		least = took < least ? took : least;
		most = took > most ? took : most;
		sum += took;
	}
	printf(ctl->json ? "{\"count\":%lu,\"min_us\":%.0f,\"mean_us\":%.0f,\"max_us\":%."
			   "0f}\n"
			 : "%lu round trips: min %.0f us, mean %.0f us, max %.0f us\n",
	       count, least, sum / (double)count, most);
	return CTL_OK;
}

int ctl_run_call(struct ctl *ctl)
{
	const char *text = ctl->arg_count > 1 ? ctl->args[1] : "{}";
	char *input = NULL;
	cJSON *args, *reply;
	size_t len;
	int r;

	if (strcmp(text, "-") == 0) {
		text = input = ctl_read_file("-", INPUT_MAX, &len);
		if (!input)
			return ctl_failed("standard input: %s", strerror(errno));
	}
	args = cJSON_Parse(text);
	ctl->raw = true;
	free(input);
	if (!cJSON_IsObject(args)) {
		cJSON_Delete(args);
		return ctl_usage("call: the argument must be a JSON object");
	}
	r = ctl_ask(ctl, ctl->args[0], args, &reply);
	if (r)
		return r;
	ctl_print_json(reply);
	cJSON_Delete(reply);
	return CTL_OK;
}

/* Send a command and print `done`, unless --json. */
static int act(struct ctl *ctl, const char *cmd, cJSON *args, const char *done)
{
	cJSON *reply;
	int r = ctl_ask(ctl, cmd, args, &reply);

	if (r)
		return r;
	if (ctl->json)
		ctl_print_json(reply);
	else
		puts(done);
	cJSON_Delete(reply);
	return CTL_OK;
}

int ctl_run_abort(struct ctl *ctl)
{
	cJSON *args = cJSON_CreateObject();

	cJSON_AddStringToObject(args, "room", ctl->args[0]);
	if (ctl->role)
		cJSON_AddStringToObject(args, "role", ctl->role);
	if (ctl->reason)
		cJSON_AddStringToObject(args, "reason", ctl->reason);
	return act(ctl, "room.abort", args,
		   "aborting; the room fails when its transfers have ended");
}

void ctl_progress(const char *fmt, ...)
{
	va_list ap;

	if (!isatty(STDERR_FILENO))
		return;
	fputs("\r\033[K", stderr);
	if (fmt) {
		va_start(ap, fmt);
		vfprintf(stderr, fmt, ap);
		va_end(ap);
	}
	fflush(stderr);
}

/* Waits until the daemon has exited. */
static int drain_wait(struct ctl *ctl)
{
	double began_s = clock_s();
	cJSON *reply;
	int r;

	for (;;) {
		cJSON *args = cJSON_CreateObject();
		const cJSON *room;

		cJSON_AddTrueToObject(args, "all");
		cJSON_AddTrueToObject(args, "live");
		cJSON_AddNumberToObject(args, "limit", 1);
		r = ctl_query(ctl, "room.list", args, &reply);
		if (r)
			break;
		room = ctl_list(reply, "rooms") ? ctl_list(reply, "rooms")->child : NULL;
		ctl_progress(
			"draining for %.0f s: %s open%s%s%s%.100s", clock_s() - began_s,
			ctl_count(ctl_num(reply, "total"), "room"), room ? "; room " : "",
			room ? ctl_str(room, "room", "?") : "", room ? " waits for " : "",
			ctl_str(ctl_list(room, "waits_for"), "what", ""));
		cJSON_Delete(reply);
		poll(NULL, 0, DRAIN_LOOK_MS);
	}
	ctl_progress(NULL);
	if (r != CTL_NO_DAEMON || ctl->error.code == KVD_E_NOREPLY) {
		ctl_failed("%s: %s", kvd_code_name(ctl->error.code), ctl->error.message);
		return r;
	}
	if (!ctl->json)
		puts("stopped");
	return CTL_OK;
}

int ctl_run_drain(struct ctl *ctl)
{
	int r = act(ctl, "drain", NULL,
		    "draining: no new rooms; the daemon stops when all have ended");

	fflush(stdout);
	return !r && ctl->wait ? drain_wait(ctl) : r;
}

static int print_level(const cJSON *reply)
{
	puts(ctl_str(reply, "level", "?"));
	return CTL_OK;
}

static int print_level_set(const cJSON *reply)
{
	printf("%s, was %s\n", ctl_str(reply, "level", "?"), ctl_str(reply, "was", "?"));
	return CTL_OK;
}

int ctl_run_log(struct ctl *ctl)
{
	cJSON *args = cJSON_CreateObject();

	if (ctl->arg_count)
		cJSON_AddStringToObject(args, "level", ctl->args[0]);
	return ctl_show(ctl, "log.level", args,
			ctl->arg_count ? print_level_set : print_level);
}

/* --owner, else for root the user kvd; NULL: the caller. */
static int secret_owner(const struct ctl *ctl, const struct passwd **owner_p)
{
	*owner_p = NULL;
	if (ctl->owner) {
		*owner_p = getpwnam(ctl->owner);
		if (!*owner_p)
			return ctl_failed("--owner %s: no such user", ctl->owner);
	} else if (geteuid() == 0) {
		*owner_p = getpwnam("kvd");
	}
	return CTL_OK;
}

static int write_secret(const char *path, const char *secret, const struct passwd *owner)
{
	char line[42];
	int r;

	snprintf(line, sizeof(line), "%s\n", secret);
	r = ctl_write_new(path, 0600, owner, line);
	explicit_bzero(line, sizeof(line));
	return r;
}

static int keypair_new(char public_key[41], char secret_key[41])
{
	do { /* '#' starts a comment in the files that contain these keys */
		if (zmq_curve_keypair(public_key, secret_key) < 0)
			return ctl_failed("libzmq has no CURVE: %s", zmq_strerror(errno));
	} while (*public_key == '#' || *secret_key == '#');
	return CTL_OK;
}

int ctl_run_keygen(struct ctl *ctl)
{
	char public_key[41], secret_key[41];
	const struct passwd *owner = NULL;
	int r = secret_owner(ctl, &owner);

	if (r)
		return r;
	if (ctl->owner && !ctl->arg_count)
		return ctl_usage("keygen: --owner requires FILE");
	r = keypair_new(public_key, secret_key);
	if (r)
		return r;
	if (ctl->arg_count)
		r = write_secret(ctl->args[0], secret_key, owner);
	if (!r && ctl->arg_count)
		fprintf(stderr, "kvd-ctl: %s: written, mode 0600, owner %s\n",
			ctl->args[0], owner ? owner->pw_name : "you");
	if (!r && ctl->json)
		printf(ctl->arg_count ? "{\"public\":\"%s\"}\n"
				      : "{\"public\":\"%s\",\"secret\":\"%s\"}\n",
		       public_key, secret_key);
	else if (!r && ctl->arg_count)
		printf("%s\n", public_key);
	else if (!r)
		printf("public %s\nsecret %s\n", public_key, secret_key);
	explicit_bzero(secret_key, sizeof(secret_key));
	return r;
}
