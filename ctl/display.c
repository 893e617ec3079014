/* SPDX-License-Identifier: Apache-2.0 */
#include "ctl/display.h"

#include <string.h>

#include "daemon/base/sanitize.h"

void display_sanitize(char *text)
{
	text[sanitize_text(text, strlen(text))] = '\0';
}

void display_sanitize_json(cJSON *json)
{
	for (; json; json = json->next) {
		if (json->string)
			display_sanitize(json->string);
		if (json->valuestring)
			display_sanitize(json->valuestring);
		display_sanitize_json(json->child);
	}
}

size_t display_width(const char *text)
{
	size_t n = 0;

	for (; *text; text++)
		n += ((unsigned char)*text & 0xc0) != 0x80;
	return n;
}

void display_print_json(const cJSON *json, FILE *out)
{
	char *text = json ? cJSON_Print(json) : NULL;

	for (const unsigned char *b = (unsigned char *)text; b && *b; b++) {
		if (*b == 0x7f)
			fputs("\\u007f", out);
		else if (*b == 0xc2 && b[1] >= 0x80 && b[1] < 0xa0)
			fprintf(out, "\\u00%02x", *++b);
		else
			fputc(*b, out);
	}
	if (text)
		fputc('\n', out);
	cJSON_free(text);
}
