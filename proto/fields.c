/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/fields.h"

#include <math.h>
#include <string.h>

#include "daemon/base/err.h"

const struct field *field_find(const struct field *fields, const char *name)
{
	for (; fields && fields->name; fields++) {
		if (strcmp(fields->name, name) == 0)
			return fields;
	}
	return NULL;
}

/* "send, recv, offer or pull" */
static void names_print(const char *const *names, char *text, size_t size)
{
	for (size_t n = 0; *names; names++) {
		n += (size_t)snprintf(text + n, size - n, "%s%s", *names,
				      !names[1]	  ? ""
				      : !names[2] ? " or "
						  : ", ");
		if (n >= size)
			return;
	}
}

static int choice_read(const struct field *f, const cJSON *obj, int64_t *out_p)
{
	const char *name = NULL;
	char wanted[128] = "";
	int r = json_get_str(obj, f->name, f->required, SIZE_MAX, &name);

	if (r < 0 || !name)
		return err_pass(r);
	for (int i = 0; f->names[i]; i++) {
		if (strcmp(name, f->names[i]) == 0) {
			*out_p = i;
			return 0;
		}
	}
	names_print(f->names, wanted, sizeof(wanted));
	return err_raise(ERR_INVAL, "%s: '%.16s' is not %s", f->name, name, wanted);
}

static int fields_number_read(const struct field *f, const cJSON *obj, void *to)
{
	int64_t v = f->preset;
	uint32_t narrow;
	int r;

	if (f->type == FIELD_U64)
		r = json_get_u64(obj, f->name, f->required, (uint64_t *)&v);
	else if (f->type == FIELD_CHOICE)
		r = choice_read(f, obj, &v);
	else if (f->type == FIELD_FD)
		r = json_get_int(obj, f->name, f->required, 0, INT32_MAX, &v);
	else
		r = json_get_int(obj, f->name, f->required, f->min, f->max, &v);
	narrow = (uint32_t)v; /* the macros have checked that it fits */
	if (f->bytes == sizeof(narrow))
		memcpy(to, &narrow, sizeof(narrow));
	else
		memcpy(to, &v, sizeof(v));
	return err_pass(r);
}

static int field_real_read(const struct field *f, const cJSON *obj, double *to)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(obj, f->name);

	*to = 0;
	if (!item)
		return f->required ? err_raise(ERR_INVAL, "%s: missing", f->name) : 0;
	if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble))
		return err_raise(ERR_INVAL, "%s: a number was expected", f->name);
	*to = item->valuedouble;
	return 0;
}

static int field_read(const struct field *f, const cJSON *obj, void *to)
{
	size_t limit = f->max ? (size_t)f->max : SIZE_MAX;

	switch (f->type) {
	case FIELD_STR:
		*(const char **)to = NULL;
		return json_get_str(obj, f->name, f->required, limit, to);
	case FIELD_BOOL:
		*(bool *)to = false;
		return json_get_bool(obj, f->name, f->required, to);
	case FIELD_NUMBER:
		return err_pass(field_real_read(f, obj, to));
	case FIELD_ARRAY:
		*(const cJSON **)to = NULL;
		return json_get_array(obj, f->name, f->required, limit, to);
	case FIELD_OBJECT:
		*(const cJSON **)to = NULL;
		return json_get_object(obj, f->name, f->required, to);
	case FIELD_INT:
	case FIELD_U64:
	case FIELD_CHOICE:
	case FIELD_FD:
		break;
	}
	return fields_number_read(f, obj, to);
}

int fields_read(const struct field *fields, const cJSON *obj, void *args)
{
	int r = 0;

	for (; r >= 0 && fields && fields->name; fields++)
		r = field_read(fields, obj, (char *)args + fields->at);
	return err_pass(r);
}

int fields_read_all(const struct field *fields, const cJSON *obj, void *args)
{
	const cJSON *it;

	cJSON_ArrayForEach(it, obj) {
		if (!field_find(fields, it->string))
			return err_raise(ERR_INVAL, "%.64s: unknown member", it->string);
	}
	return err_pass(fields_read(fields, obj, args));
}
