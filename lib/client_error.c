/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors on the engine's side: the daemon's codes, by their names on the wire, and
 * libkvd's own from 512 on. The public enum repeats the numbers of the daemon's table, so
 * that an engine needs no header of the daemon; tests/unit/test_client.c compares the
 * two. A client keeps the record of its last failed call; failures without a client
 * (opening, memory, layouts) are kept per thread.
 */
#include "lib/client.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"

static const struct {
	int code;
	const char *name;
	bool retryable;
	const char *scope;
} local_codes[] = {
	{KVD_E_GONE, "EGONE", false, "op"},
	{KVD_E_NODAEMON, "ENODAEMON", true, "session"},
	{KVD_E_LOST, "ELOST", true, "session"},
	{KVD_E_NOREPLY, "ENOREPLY", true, "op"},
	{KVD_E_FULL, "EFULL", true, "op"},
	{KVD_E_FORKED, "EFORKED", false, "session"},
	{KVD_E_DEAD, "EDEAD", true, "session"},
};

static _Thread_local struct kvd_error thread_error;

struct kvd_error *client_error_thread(void)
{
	return &thread_error;
}

static void error_fill(struct kvd_error *error, int code)
{
	const char *scope = err_scope_name(err_default_scope((enum err_code)code));
	bool retryable = err_default_retryable((enum err_code)code);

	for (size_t i = 0; i < ARRAY_LEN(local_codes); i++)
		if (local_codes[i].code == code) {
			scope = local_codes[i].scope;
			retryable = local_codes[i].retryable;
		}
	error->code = code;
	error->retryable = retryable;
	snprintf(error->scope, sizeof(error->scope), "%s", scope);
}

void client_error_set(struct kvd_error *error, int code, const char *fmt, ...)
{
	va_list ap;

	error_fill(error, code);
	va_start(ap, fmt);
	vsnprintf(error->message, sizeof(error->message), fmt, ap);
	va_end(ap);
}

int client_fail(struct kvd_client *client, int code, const char *fmt, ...)
{
	va_list ap;

	error_fill(&client->error, code);
	va_start(ap, fmt);
	vsnprintf(client->error.message, sizeof(client->error.message), fmt, ap);
	va_end(ap);
	return -code;
}

int client_fail_nomem(struct kvd_client *client)
{
	return client_fail(client, KVD_E_NOMEM, "out of memory in this process");
}

void client_error_parse(struct kvd_error *error, const cJSON *reply)
{
	const cJSON *e = cJSON_GetObjectItemCaseSensitive(reply, "error");
	const char *name = client_get_str(e, "code");
	const char *message = client_get_str(e, "message");
	const char *scope = client_get_str(e, "scope");
	const cJSON *retryable = cJSON_GetObjectItemCaseSensitive(e, "retryable");

	if (!name) {
		client_error_set(error, KVD_E_PROTO,
				 "the daemon's reply is neither ok nor an error");
		return;
	}
	client_error_set(error, (int)err_of_name(name), "%s", message ? message : name);
	if (cJSON_IsBool(retryable))
		error->retryable = cJSON_IsTrue(retryable);
	if (scope)
		snprintf(error->scope, sizeof(error->scope), "%s", scope);
}

const struct kvd_error *kvd_last_error(const struct kvd_client *client)
{
	return client ? &client->error : &thread_error;
}

const char *kvd_code_name(int code)
{
	int c = code < 0 && code > -1024 ? -code : code;

	if (c == KVD_OK)
		return "OK";
	for (size_t i = 0; i < ARRAY_LEN(local_codes); i++)
		if (local_codes[i].code == c)
			return local_codes[i].name;
	if (c > 0 && c < ERR_CODE_END)
		return err_name((enum err_code)c);
	return "EUNKNOWN";
}

const char *kvd_state_name(int state)
{
	static const char *const names[] = {"failed", "bootstrapping",
					    "waiting_for_input", "transferring",
					    "success"};

	return state >= 0 && state < (int)ARRAY_LEN(names) ? names[state] : "unknown";
}

const char *kvd_version(void)
{
	return KVD_VERSION;
}

bool client_get_u64(const cJSON *reply, const char *name, uint64_t *out_p)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(reply, name);
	uint64_t value = 0;
	const char *s;

	if (cJSON_IsNumber(item)) {
		if (!(item->valuedouble >= 0 && item->valuedouble <= 9007199254740991.0))
			return false;
		*out_p = (uint64_t)item->valuedouble;
		return true;
	}
	if (!cJSON_IsString(item) || !*item->valuestring)
		return false;
	for (s = item->valuestring; *s; s++) {
		if (*s < '0' || *s > '9')
			return false;
		if (__builtin_mul_overflow(value, 10u, &value) ||
		    __builtin_add_overflow(value, (uint64_t)(*s - '0'), &value))
			return false;
	}
	*out_p = value;
	return true;
}

const char *client_get_str(const cJSON *reply, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(reply, name);

	return cJSON_IsString(item) ? item->valuestring : NULL;
}
