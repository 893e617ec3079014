/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Control commands list the objects, as for kvd-ctl, so there is one renderer of a room
 * and of a peer, with its bounds per turn. An internal session sends them, one after the
 * other, and ends with the last reply. The server's thread parses the replies, and keeps
 * only the members that are listed here, so a new member of a record is not published by
 * accident. Rooms have no names of requests, engines, pools or processes there.
 */
#include "daemon/metrics/page_status.h"

#include <cjson/cJSON.h>

#include "daemon/base/context.h"
#include "daemon/base/err.h"
#include "daemon/config/config.h"
#include "daemon/link/link_curve.h"
#include "daemon/request/commands.h"
#include "daemon/session/session.h"
#include "proto/out.h"

#define ITEMS_MAX 20 /* of a list */

static const struct {
	const char *name, *line;
} lists[PAGE_STATUS_REPLIES] = {
	{"rooms", "{\"cmd\":\"room.list\",\"all\":true,\"live\":true,\"limit\":20}"},
	{"failed",
	 "{\"cmd\":\"room.history\",\"all\":true,\"failed\":true,\"limit\":20}"},
	{"peers", "{\"cmd\":\"peer.list\",\"limit\":20}"},
};
static const char members[] =
	" rooms peers lost room role state_name bytes expected_bytes waits_for what "
	"since_ms error code message ended_ms peer name known_as endpoint state "
	"transport self why rooms_ended rooms_failed downs last_error resolved age_ms ";

/* ---- the loop's ---- */

static void on_reply(void *arg, const char *text, size_t len)
{
	struct page_status *status = arg;

	text_put(&status->reply[status->at++], text, len);
	loop_defer(status->kvd->loop, &status->next);
}

/* False: no memory. */
static bool send_next(struct page_status *status)
{
	const char *line = lists[status->at].line;
	struct request *req = request_new(status->session, strlen(line), NULL, 0);

	if (!req)
		return false;
	req->line = cJSON_Parse(line); /* NULL is answered with an error */
	req->on_answer = on_reply;
	req->on_answer_arg = status;
	commands_dispatch(req);
	return true;
}

/* A daemon that stops ends all sessions itself; their requests get no reply. */
static void on_next(struct loop_defer *defer)
{
	struct page_status *status = container_of(defer, struct page_status, next);

	if (!status->kvd->stopping) {
		if (status->at < PAGE_STATUS_REPLIES && send_next(status))
			return;
		session_end(status->session, "the status was read");
	}
	status->session = NULL;
	err_clear();
	status->on_taken(status);
}

void page_status_take(struct page_status *status)
{
	struct kvd *kvd = status->kvd;

	for (size_t i = 0; i < PAGE_STATUS_REPLIES; i++)
		text_fini(&status->reply[i]);
	status->at = 0;
	status->shown = kvd->config->metrics_rooms;
	if (status->shown && !kvd->stopping &&
	    session_new_own(kvd, "metrics page", &status->session) == 0) {
		status->session->announced = false; /* nor is its end logged */
		loop_defer(kvd->loop, &status->next);
		return;
	}
	err_clear();
	status->on_taken(status);
}

void page_status_init(struct page_status *status, struct kvd *kvd,
		      void (*on_taken)(struct page_status *status))
{
	*status = (struct page_status){.kvd = kvd, .on_taken = on_taken};
	loop_defer_init(&status->next, on_next);
}

void page_status_fini(struct page_status *status)
{
	loop_defer_cancel(&status->next);
	for (size_t i = 0; i < PAGE_STATUS_REPLIES; i++)
		text_fini(&status->reply[i]);
}

/* ---- the server's thread ---- */

static bool is_member(const char *name)
{
	const char *at = strstr(members, name);
	size_t len = strlen(name);

	while (at && !(at > members && at[-1] == ' ' && at[len] == ' '))
		at = strstr(at + 1, name);
	return at;
}

/* Endpoints and errors may contain a CURVE key: "#KEY", or as a word. */
static void keys_cut(char *text)
{
	for (char *at = text; *at; at++) {
		char *key = at + (*at == '#'), *end = key + CURVE_KEY_CHARS;

		if ((at == text || at[-1] == ' ' || key > at) &&
		    strnlen(key, CURVE_KEY_CHARS) == CURVE_KEY_CHARS &&
		    curve_key_check(key, CURVE_KEY_CHARS) && strchr(" ,;", *end))
			memmove(at, end, strlen(end) + 1);
	}
}

/* Of our own reply, which is a few levels deep. */
static void keep_members(cJSON *json)
{
	int items = 0;

	for (cJSON *it = json->child, *next; it; it = next) {
		next = it->next;
		if (it->string ? !is_member(it->string) : items++ >= ITEMS_MAX)
			cJSON_Delete(cJSON_DetachItemViaPointer(json, it));
		else if (cJSON_IsString(it))
			keys_cut(it->valuestring);
		else
			keep_members(it);
	}
}

void page_status_json(const struct page_status *status, struct text *out)
{
	out_object(out, NULL);
	out_bool(out, "shown", status->shown);
	for (size_t i = 0; i < PAGE_STATUS_REPLIES; i++) {
		cJSON *reply = cJSON_ParseWithLength(status->reply[i].data,
						     status->reply[i].len);
		char *text = NULL;

		if (reply) {
			keep_members(reply);
			text = cJSON_PrintUnformatted(reply);
		}
		if (text)
			out_json(out, lists[i].name, text);
		cJSON_free(text);
		cJSON_Delete(reply);
	}
	text_puts(out, "}\n");
}
