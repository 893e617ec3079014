/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engines find and hold by the submission ring. A line of a test has the same members by
 * name: 'chunk.find' and 'chunk.hold' {space, ids, first, lease_ms, remote_ms},
 * 'chunk.join' {space, secret, lease_ms}, 'chunk.release' {hold}. It becomes an entry of
 * the ring, sent over the socket, and the values of its slot become the answer: {hold,
 * secret, first, chunks, tokens, remote}, or the error.
 */
#include "tests/lib/hold_lines.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "proto/base64.h"
#include "proto/kvd_status.h"
#include "tests/lib/ring_entries.h"

#define LEASE_MS 10000
#define SLOT_FIRST (SESSION_SLOTS + 8192)

static double number(const cJSON *line, const char *name, double preset)
{
	const cJSON *item = cJSON_GetObjectItem(line, name);

	return item ? cJSON_GetNumberValue(item) : preset;
}

/* A free one, behind those that tests choose. */
static void slot_choose(struct hold_line *hold)
{
	uint32_t slot = SLOT_FIRST;
	uint64_t word = slot_read(hold->session, slot).word;

	while (kvd_word_gen(word) && !(kvd_word_flags(word) & KVD_FLAG_FREE))
		word = slot_read(hold->session, ++slot).word;
	hold->entry.slot = slot;
	hold->entry.gen = kvd_ring_next_gen(kvd_word_gen(word));
}

/* Each hold has another one. */
static void secret_make(uint8_t secret[KVD_RING_SECRET_BYTES])
{
	static uint64_t last;

	last++;
	memcpy(secret, &last, sizeof(last));
	memset(secret + sizeof(last), 0xa5, KVD_RING_SECRET_BYTES - sizeof(last));
}

static size_t ids_read(const cJSON *line, uint8_t *to)
{
	const cJSON *id;
	size_t bytes = 0;

	cJSON_ArrayForEach(id, cJSON_GetObjectItem(line, "ids")) {
		assert_true(hex_read(id->valuestring, to + bytes, KVD_RING_ID_BYTES));
		bytes += KVD_RING_ID_BYTES;
	}
	return bytes;
}

static cJSON *submit_line(const struct kvd_ring_entry *entry, const uint8_t *data)
{
	char words[BASE64_CHARS(sizeof(*entry)) + 1];
	char *text = malloc(BASE64_CHARS(entry->bytes) + 1);
	cJSON *line = cJSON_CreateObject();

	base64_encode(entry, sizeof(*entry), words);
	base64_encode(data, entry->bytes, text);
	cJSON_AddStringToObject(line, "cmd", "xfer.submit");
	cJSON_AddStringToObject(line, "entry", words);
	cJSON_AddStringToObject(line, "data", text);
	free(text);
	return line;
}

void hold_line_begin(struct hold_line *hold, struct session *session, cJSON **line)
{
	static const struct {
		const char *cmd;
		enum kvd_ring_op op;
	} ops[] = {{"chunk.find", KVD_RING_FIND},
		   {"chunk.hold", KVD_RING_HOLD},
		   {"chunk.join", KVD_RING_HOLD},
		   {"chunk.release", KVD_RING_RELEASE}};
	const char *cmd = cJSON_GetStringValue(cJSON_GetObjectItem(*line, "cmd"));
	const char *secret = cJSON_GetStringValue(cJSON_GetObjectItem(*line, "secret"));
	int count = cJSON_GetArraySize(cJSON_GetObjectItem(*line, "ids"));
	struct kvd_ring_entry *e = &hold->entry;
	uint8_t *data;
	cJSON *given = *line;

	*hold = (struct hold_line){.session = session};
	for (size_t i = 0; cmd && i < ARRAY_LEN(ops); i++)
		if (strcmp(cmd, ops[i].cmd) == 0)
			e->op = ops[i].op;
	if (!e->op)
		return;
	data = malloc(KVD_RING_SECRET_BYTES + (size_t)count * KVD_RING_ID_BYTES + 1);
	if (e->op == KVD_RING_RELEASE) {
		e->a = (uint64_t)number(given, "hold", 0);
	} else {
		slot_choose(hold);
		e->a = (uint64_t)number(given, "space", 0);
		e->c = (uint64_t)number(given, "first", 0);
		e->n0 = (uint32_t)count;
	}
	if (e->op == KVD_RING_HOLD) {
		e->b = (uint64_t)number(given, "lease_ms", LEASE_MS);
		e->n1 = (uint32_t)number(given, "remote_ms", 0);
		secret_make(hold->secret);
		if (secret)
			assert_true(hex_read(secret, hold->secret, sizeof(hold->secret)));
		memcpy(data, hold->secret, sizeof(hold->secret));
		e->bytes = sizeof(hold->secret);
	}
	if (e->n1)
		e->op = KVD_RING_HOLD_REMOTE;
	e->bytes += (uint32_t)ids_read(given, data + e->bytes);
	*line = submit_line(e, data);
	free(data);
	cJSON_Delete(given);
}

bool hold_line_is_over(void *arg)
{
	const struct hold_line *hold = arg;
	uint64_t word = slot_read(hold->session, hold->entry.slot).word;

	return hold->entry.op == KVD_RING_RELEASE ||
	       (kvd_word_gen(word) == hold->entry.gen &&
		(kvd_word_state(word) == KVD_SUCCESS ||
		 kvd_word_state(word) == KVD_FAILED));
}

bool hold_line_answer(const struct hold_line *hold, cJSON *answer)
{
	struct kvd_status_slot slot = slot_read(hold->session, hold->entry.slot);
	char secret[2 * KVD_RING_SECRET_BYTES + 1];

	if (hold->entry.op == KVD_RING_RELEASE)
		return true;
	if (kvd_word_state(slot.word) == KVD_FAILED) {
		cJSON_DeleteItemFromObject(answer, "ok");
		cJSON_AddStringToObject(
			cJSON_AddObjectToObject(answer, "error"), "code",
			err_name((enum err_code)kvd_word_error(slot.word)));
		return false;
	}
	if (hold->entry.op != KVD_RING_FIND) {
		hex_write(hold->secret, sizeof(hold->secret), secret);
		cJSON_AddNumberToObject(answer, "hold",
					(double)(KVD_RING_IDS + hold->entry.slot));
		cJSON_AddStringToObject(answer, "secret", secret);
		cJSON_AddNumberToObject(answer, "first",
					(double)kvd_more_first_token(slot.more));
	}
	cJSON_AddNumberToObject(answer, "chunks", (double)slot.total);
	cJSON_AddNumberToObject(answer, "tokens", (double)slot.bytes);
	cJSON_AddNumberToObject(answer, "remote", (double)kvd_more_rows(slot.more));
	return true;
}
