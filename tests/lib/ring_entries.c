/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/ring_entries.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/session/status.h"
#include "proto/base64.h"

void payload_add(struct payload *p, const void *bytes, size_t len)
{
	p->bytes = realloc(p->bytes, p->len + len + 8);
	if (len)
		memcpy(p->bytes + p->len, bytes, len);
	memset(p->bytes + p->len + len, 0, 8);
	p->len += len;
}

struct kvd_ring_view *payload_view(struct payload *p, const char *name,
				   const uint32_t *pages, uint32_t count)
{
	struct kvd_ring_view view = {.page_count = count};
	size_t at = p->len;

	snprintf(view.name, sizeof(view.name), "%s", name);
	payload_add(p, &view, sizeof(view));
	payload_add(p, pages, count * sizeof(*pages));
	p->len += count % 2 * 4;
	p->views = p->len;
	p->count++;
	return (struct kvd_ring_view *)(void *)(p->bytes + at);
}

void payload_text(struct payload *p, const char *fmt, ...)
{
	char text[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	for (char *c = text; *c; c++)
		*c = *c == '\'' ? '"' : *c;
	payload_add(p, text, strlen(text));
}

cJSON *entry_say(struct cluster *c, struct session *session,
		 const struct kvd_ring_entry *entry, struct payload *payload)
{
	struct kvd_ring_entry e = *entry;
	char text[BASE64_CHARS(sizeof(e)) + 1], *data;
	cJSON *answer;

	if (payload) {
		e.bytes = e.bytes ? e.bytes : (uint32_t)payload->len;
		e.n1 = e.n1 ? e.n1 : payload->count;
		e.n2 = e.n2 ? e.n2 : (uint32_t)(payload->len - payload->views);
	}
	data = calloc(1, BASE64_CHARS(payload ? payload->len : 0) + 1);
	base64_encode(&e, sizeof(e), text);
	base64_encode(payload ? payload->bytes : NULL, payload ? payload->len : 0, data);
	answer = cluster_call(
		c, session, "{'cmd':'xfer.submit','entry':'%s','data':'%s'}", text, data);
	free(data);
	if (payload)
		free(payload->bytes);
	if (payload)
		*payload = (struct payload){0};
	return answer;
}

void entry_give(struct cluster *c, struct session *session,
		const struct kvd_ring_entry *entry, struct payload *payload)
{
	cJSON *answer = entry_say(c, session, entry, payload);

	if (!cJSON_HasObjectItem(answer, "ok"))
		fail_msg("op %u: %s", entry->op, cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
}

void entry_breaks(struct cluster *c, struct session *session,
		  const struct kvd_ring_entry *entry, struct payload *payload)
{
	cJSON *answer = entry_say(c, session, entry, payload);
	const cJSON *error = cJSON_GetObjectItem(answer, "error");

	assert_non_null(error);
	assert_string_equal(cJSON_GetObjectItem(error, "code")->valuestring, "EPROTO");
	cJSON_Delete(answer);
}

struct kvd_status_slot slot_read(const struct session *session, uint32_t slot)
{
	struct kvd_status_slot s;

	assert_int_equal(
		pread(status_page_fd(session->status), &s, sizeof(s),
		      (off_t)(sizeof(struct kvd_status_header) + slot * sizeof(s))),
		sizeof(s));
	return s;
}
