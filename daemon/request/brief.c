/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/request/brief.h"

#include <assert.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

#include "daemon/base/err.h"

/* cJSON's nodes are not const; printing and copying do not change them. */
static char *borrowed(const char *s)
{
	return (char *)(uintptr_t)s;
}

static cJSON *node(struct brief *brief, int type, const char *name)
{
	cJSON *it = &brief->nodes[brief->used++];

	assert(brief->used <= BRIEF_NODES_MAX);
	*it = (cJSON){.type = type, .string = borrowed(name)};
	return it;
}

static cJSON *brief_member(struct brief *brief, cJSON *object, int type, const char *name)
{
	cJSON *it = node(brief, type, name), *last = object->child;

	if (!last) {
		object->child = it;
		return it;
	}
	while (last->next)
		last = last->next;
	last->next = it;
	it->prev = last;
	return it;
}

bool brief_whole(double value, char text[BRIEF_WHOLE_MAX])
{
	/* above, a double is not exact */
	if (!(value >= -9007199254740991.0 && value <= 9007199254740991.0) ||
	    value != (double)(int64_t)value)
		return false;
	snprintf(text, BRIEF_WHOLE_MAX, "%" PRId64, (int64_t)value);
	return true;
}

void brief_init(struct brief *brief)
{
	brief->used = 0;
	node(brief, cJSON_Object, NULL);
}

void brief_number(struct brief *brief, const char *name, double value)
{
	char *whole = brief->whole[brief->used];
	cJSON *it = brief_member(brief, brief->nodes, cJSON_Number, name);

	if (brief_whole(value, whole)) {
		it->type = cJSON_Raw;
		it->valuestring = whole;
	}
	it->valuedouble = value;
	it->valueint = value > INT32_MAX ? INT32_MAX : (int)value; /* as cJSON does */
}

void brief_text(struct brief *brief, const char *name, const char *text)
{
	brief_member(brief, brief->nodes, cJSON_String, name)->valuestring =
		borrowed(text);
}

void brief_bool(struct brief *brief, const char *name, bool value)
{
	brief_member(brief, brief->nodes, value ? cJSON_True : cJSON_False, name);
}

void brief_error(struct brief *brief, const struct err *err)
{
	cJSON *e = brief_member(brief, brief->nodes, cJSON_Object, "error");

	brief_member(brief, e, cJSON_String, "code")->valuestring =
		borrowed(err_name(err->code));
	brief_member(brief, e, cJSON_String, "message")->valuestring =
		borrowed(err->text);
	brief_member(brief, e, err->retryable ? cJSON_True : cJSON_False, "retryable");
	brief_member(brief, e, cJSON_String, "scope")->valuestring =
		borrowed(err_scope_name(err->scope));
}
